"""The batcher under any order of events: submit, cancel, steps that come back or do not, lost KV, plan changes, time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from envs.decision.length_estimator import LengthEstimator
from runtime.torch_tp.batcher import Batcher, BatcherSettings
from runtime.torch_tp.requests import GenerationRequest, Refused, TokenEvent
from runtime.torch_tp.steps import StepResult
from tests.runtime.torch_tp.toy_ranks import EOS, VOCABULARY, ToyRanks, expected_answer

TEXTS = [[(7 * i * k + i) % 40 for i in range(60)] for k in range(1, 4)]
prompts = st.builds(
    lambda text, length, end: tuple(TEXTS[text][:length] + end),
    st.integers(0, 2),
    st.integers(0, 60),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
)  # few beginnings, so that prefixes are shared


def short_answers_expected() -> LengthEstimator:
    """Reservations turn out too small, so that slots must grow and requests be displaced."""
    lengths = LengthEstimator(prior_answers=0.01)
    for class_index in range(3):
        for _ in range(50):
            lengths.observe(class_index, 3)
    return lengths


class BatcherMachine(RuleBasedStateMachine):
    """Checked throughout: no slot twice, KV tokens conserved here and at the ranks, answers are prefixes of the undisturbed ones, events
    come in order, every request ends once. At the end everything that is left is served, in bounded time."""

    @initialize(
        pool=st.integers(40, 300), slots=st.integers(1, 6), growth=st.integers(1, 40), block=st.integers(1, 8), is_short=st.booleans(),
        kept_slots=st.none() | st.integers(0, 5), kept_tokens=st.none() | st.integers(0, 40),
    )  # fmt: skip
    def begin(self, pool, slots, growth, block, is_short, kept_slots, kept_tokens):
        chosen = BatcherSettings(
            context_tokens=120, kv_tokens_max=pool, slots_max=slots, vocabulary=VOCABULARY, eos_ids=(EOS,), queue_limit=12,
            chunk_tokens_max=32, chunk_tokens_min=4, growth_tokens=growth, block_tokens=block, starve_after_s=0.5, head_start_s=0.3,
            priority_slots=kept_slots if kept_slots is None else min(kept_slots, slots - 1), priority_kv_tokens=kept_tokens,
        )  # fmt: skip
        self.batcher = Batcher(chosen, lengths=short_answers_expected() if is_short else None)
        self.ranks = ToyRanks(slots, pool)
        self.now_s = 0.0
        self.command = None
        self.count = 0
        self.version = 0
        self.expected: tuple[int, tuple[int, ...], int] | None = None  # slot, ids to come there, how many are there already
        self.requests: dict[str, GenerationRequest] = {}
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self.refused = 0

    def take(self, events):
        for event in events:
            assert event.request_id in self.requests
            assert not self.events[event.request_id] or self.events[event.request_id][-1].finish_reason is None, "an event after the end"
            self.events[event.request_id].append(event)

    @rule(
        prompt=prompts,
        answer=st.integers(1, 60),
        priority=st.integers(0, 2),
        ignore_eos=st.booleans(),
        deadline_s=st.none() | st.floats(0.05, 2.0),
    )
    def submit(self, prompt, answer, priority, ignore_eos, deadline_s):
        self.count += 1
        deadline = None if deadline_s is None else self.now_s + deadline_s
        request = GenerationRequest(
            f"r{self.count}",
            tuple(prompt),
            answer,
            priority=priority,
            ignore_eos=ignore_eos,
            deadline_s=deadline,
            class_index=self.count % 3,
        )
        try:
            self.batcher.submit(request, self.now_s)
            self.requests[request.request_id] = request
        except Refused as error:
            self.refused += 1
            assert error.reason in ("too_long", "queue_full")

    @rule(which=st.integers(0, 200), answer=st.integers(1, 20))
    def follow_up(self, which, answer):
        """The next turn of a conversation: prompt, answer and something more."""
        over = [name for name in self.requests if self.events[name] and self.events[name][-1].finish_reason in ("stop", "length")]
        if over:
            before = self.requests[over[which % len(over)]]
            self.submit((*before.prompt, *expected_answer(before), 1), answer, which % 2, True, None)

    @rule(which=st.integers(0, 200))
    def cancel(self, which):
        live = [name for name in self.requests if not self.events[name] or self.events[name][-1].finish_reason is None]
        if live:
            assert self.batcher.cancel(live[which % len(live)], self.now_s)
            self.take(self.batcher.drain_events())

    @precondition(lambda self: self.command is None)
    @rule()
    def ask(self):
        self.command = self.batcher.next_step(self.now_s)
        self.take(self.batcher.drain_events())

    @precondition(lambda self: self.command is None)
    @rule(prompt=prompts, answer=st.integers(1, 20))
    def an_urgent_request_begins_at_once(self, prompt, answer):
        """Where no other of its kind is inside and it fits into what is kept for them, whoever else runs or waits."""
        limits, batch = self.batcher.settings, self.batcher._batch
        if any(resident.is_urgent for resident in (*batch.running.values(), *batch.waiting)):
            return
        self.submit(prompt, answer, 1, True, None)
        name = f"r{self.count}"
        resident = self.batcher._residents.get(name)
        if resident is None or limits.kept_slots == 0 or batch._tokens_to_reserve(resident) > limits.kept_kv_tokens or self.has_lone_giant:
            return
        self.ask()
        assert self.command is not None and name in {part.request_id for part in self.command.slices}

    @property
    def has_lone_giant(self) -> bool:
        """Whether a request of normal priority runs that alone takes of what is kept."""
        limits, running = self.batcher.settings, self.batcher._batch.running.values()
        return sum(self.batcher._batch._reserved(s) for s in running if not s.is_urgent) > limits.kv_tokens_max - limits.kept_kv_tokens

    @invariant()
    def what_is_kept_for_urgent_requests_is_left_to_them(self):
        if hasattr(self, "batcher"):
            limits, normal = self.batcher.settings, [s for s in self.batcher._batch.running.values() if not s.is_urgent]
            assert len(normal) <= max(1, limits.slots_max - limits.kept_slots)
            assert len(normal) <= 1 or not self.has_lone_giant

    @precondition(lambda self: self.command is not None)
    @rule()
    def answer(self):
        result = self.ranks.run(self.command)
        began_s = self.now_s
        self.now_s += 0.01 * result.passes
        self.take(self.batcher.apply(StepResult(result.step, result.tokens, (), began_s, self.now_s), self.now_s))
        self.command = None
        held = {slot: self.ranks.slots[slot].tokens_max for slot in self.ranks.slots}
        pool = self.batcher._batch.pool
        pending, ledger = set(pool._releases), pool.ledger
        assert set(held) - pending == set(ledger.running) | set(ledger.retained)
        assert all(held[slot] == ledger.reserved(slot) for slot in set(held) - pending)

    @rule(count=st.integers(2, 8))
    def several(self, count):
        for _ in range(count):
            if self.command is None:
                self.ask()
            if self.command is not None:
                self.answer()

    @rule(was_carried_out=st.booleans())
    def lose_everything(self, was_carried_out):
        if self.command is not None and was_carried_out:
            self.ranks.run(self.command)
        self.command = None
        self.ranks.lose()
        self.now_s += 0.2
        self.batcher.lost_kv(None, self.now_s, pause_began_s=self.now_s - 0.2)

    @precondition(lambda self: self.command is None)
    @rule(slots=st.sets(st.integers(0, 5)))
    def lose_some(self, slots):
        self.ranks.lose(slots)
        self.batcher.lost_kv(slots, self.now_s)

    @rule()
    def change_plan(self):
        """At most two plans live: before a third, the KV of the oldest is moved. Not while some is on its way here."""
        if self.expected is not None:
            return
        live = self.batcher.live_versions()
        if len(live) > 1 and self.command is None:
            oldest = self.batcher.slots_of_plan(live[0])
            for slot in oldest:
                if slot in self.ranks.slots:
                    self.ranks.slots[slot].new = replace(self.ranks.slots[slot].new, plan_version=live[-1])
            self.batcher.moved_kv(oldest, live[-1])
        if len(self.batcher.live_versions()) == 1:
            self.version += 1
            self.batcher.use_plan(self.version)

    @precondition(lambda self: self.command is None and self.expected is None)
    @rule(prompt=prompts, more=st.integers(0, 30))
    def expect(self, prompt, more):
        """KV of a prompt comes from elsewhere, in one part or two."""
        slot = self.batcher.expect((), len(prompt) + more)
        assert slot is None or self.batcher.is_expected(slot)
        if slot is not None:
            self.expected = slot, prompt, 0

    @precondition(lambda self: self.command is None and self.expected is not None)
    @rule(upto=st.integers(0, 70), goes_on=st.booleans())
    def arrive(self, upto, goes_on):
        slot, ids, start = self.expected
        if not self.batcher.is_at_ranks(slot):
            return
        self.expected = None
        came = ids[:upto] if upto > start else ()
        if came and self.batcher.is_expected(slot):
            held = self.ranks.slots[slot]
            assert len(held.held) >= start and held.tokens_max >= len(came)
            held.held = held.held[:start] + list(came[start:])
        is_there = self.batcher.arrived(slot, came)
        if is_there and came and goes_on and len(ids) > len(came):
            again = self.batcher.expect(came, len(ids))
            if again is not None:
                self.expected = again, ids, len(came)

    @rule(seconds=st.floats(0.0, 1.0))
    def wait(self, seconds):
        self.now_s += seconds

    @invariant()
    def conserved(self):
        if hasattr(self, "batcher"):
            self.batcher.check()

    def teardown(self):
        if not hasattr(self, "batcher"):
            return
        if self.command is not None:
            self.answer()
        if self.expected is not None:
            self.batcher.arrived(self.expected[0], ())
        work = sum(request.tokens_needed for request in self.requests.values())
        for _ in range(200 + 10 * work):
            if self.batcher.is_idle:
                break
            self.ask()
            if self.command is not None:
                self.answer()
        assert self.batcher.is_idle, "starved"
        self.take(self.batcher.drain_events())
        for name, request in self.requests.items():
            self.check_answer(request, self.events[name])
        assert self.count == len(self.requests) + self.refused
        self.batcher.drop_retained()
        self.ask()
        if self.command is not None:
            self.answer()
        assert self.ranks.slots == {} and self.batcher.load(self.now_s).kv_tokens_running == 0

    def check_answer(self, request: GenerationRequest, events: list[TokenEvent]):
        tokens = [event.token for event in events if event.token is not None]
        assert [event.index for event in events if event.token is not None] == list(range(len(tokens)))
        end = events[-1]
        expected = expected_answer(request)
        assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
        if end.finish_reason in ("stop", "length"):
            assert tokens == expected
        else:
            assert end.finish_reason in ("cancelled", "deadline") and tokens == expected[: len(tokens)]
        report = end.report
        assert report.output_tokens == len(tokens) and abs(report.unexplained_s) < 1e-6
        assert report.preemptions <= self.batcher.settings.preemptions_max + 1


BatcherMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestBatcherMachine = BatcherMachine.TestCase
