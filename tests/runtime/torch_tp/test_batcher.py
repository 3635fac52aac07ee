"""The batcher against ranks whose every token depends on all KV before it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from envs.domain.requests import CLASS_INDEX, LATENCY_PARTS, SERVICE_CLASSES
from runtime.torch_tp.batcher import Batcher, BatcherSettings
from runtime.torch_tp.requests import GenerationRequest, Refused, SamplingSettings, TokenEvent
from runtime.torch_tp.step_pace import StepPace
from runtime.torch_tp.steps import BROKEN_TOKEN, RankTimings, StepCommand, StepResult
from tests.runtime.torch_tp.toy_ranks import EOS, VOCABULARY, ToyRanks, expected_answer


class Serving:
    """Batcher, fake ranks and a clock that moves by what a step would take."""

    def __init__(self, step_s=lambda rows, prefill: 0.010 + 0.0005 * rows + 0.0002 * prefill, make_text=None, **settings) -> None:
        defaults = {"context_tokens": 512, "kv_tokens_max": 2048, "slots_max": 8, "eos_ids": (EOS,), "vocabulary": VOCABULARY}
        self.batcher = Batcher(BatcherSettings(**(defaults | settings)), make_text=make_text)
        self.ranks = ToyRanks(self.batcher.settings.slots_max, self.batcher.settings.kv_tokens_max)
        self.step_s = step_s
        self.now_s = 0.0
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)
        self.commands: list[StepCommand] = []

    def submit(self, request: GenerationRequest) -> GenerationRequest:
        self.batcher.submit(request, self.now_s)
        return request

    def step(self, *, check: bool = True) -> StepCommand | None:
        command = self.batcher.next_step(self.now_s)
        if command is not None:
            self.commands.append(command)
            rows = sum(len(part.tokens) == 1 for part in command.slices)
            prefill = sum(len(part.tokens) for part in command.slices if len(part.tokens) > 1)
            result = self.ranks.run(command)
            began_s = self.now_s
            self.now_s += self.step_s(rows, prefill) * result.passes
            self.take(self.batcher.apply(StepResult(result.step, result.tokens, (), began_s, self.now_s), self.now_s))
        else:
            self.take(self.batcher.drain_events())
        if check or len(self.commands) % 50 == 0:
            self.batcher.check()
        return command

    def take(self, events) -> None:
        for event in events:
            self.events[event.request_id].append(event)

    def run(self, steps: int = 5000) -> None:
        for _ in range(steps):
            if self.step(check=steps < 10_000) is None and self.batcher.is_idle:
                return
        raise AssertionError(f"not idle after {steps} steps: {self.batcher.load(self.now_s)}")

    def tokens(self, request: GenerationRequest) -> list[int]:
        events = [event for event in self.events[request.request_id] if event.token is not None]
        assert [event.index for event in events] == list(range(len(events)))
        return [event.token for event in events]

    def end(self, request: GenerationRequest) -> TokenEvent:
        ends = [event for event in self.events[request.request_id] if event.finish_reason is not None]
        assert len(ends) == 1 and ends[0] is self.events[request.request_id][-1], "a request ends once, and nothing comes after"
        return ends[0]


def make(name: str, prompt=(1, 2, 3), max_tokens: int = 8, **more) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), max_tokens, **({"ignore_eos": True} | more))


def random_request(rng: np.random.Generator, name: str, prompt_max: int = 100, answer_max: int = 60, **more) -> GenerationRequest:
    prompt = tuple(int(token) for token in rng.integers(0, VOCABULARY - 1, rng.integers(1, prompt_max)))
    answer = int(rng.integers(1, answer_max))
    return GenerationRequest(name, prompt, answer, ignore_eos=bool(rng.random() < 0.5), min_tokens=int(rng.integers(0, answer)), **more)


def test_tokens_are_those_of_an_undisturbed_run():
    rng = np.random.default_rng(3)
    serving = Serving()
    requests = [serving.submit(random_request(rng, f"r{i}")) for i in range(40)]
    serving.run()
    for request in requests:
        assert serving.tokens(request) == expected_answer(request)
        end = serving.end(request)
        stopped = serving.tokens(request)[-1] == EOS and not request.ignore_eos
        assert (end.finish_reason, end.stop) == (("stop", EOS) if stopped else ("length", None))
    assert serving.batcher.load(0.0).kv_tokens_running == 0
    serving.batcher.drop_retained()
    serving.step()
    assert serving.ranks.slots == {}


def test_min_tokens_bans_stop_ids_and_stop_ids_end_the_answer():
    serving = Serving()
    free = make("free", max_tokens=60)
    first = expected_answer(free)[5]
    request = serving.submit(make("r", max_tokens=60, stop_ids=(first,), min_tokens=20))
    serving.run()
    tokens = serving.tokens(request)
    assert first not in tokens[:20]
    assert tokens == expected_answer(request)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_or_doubled_when_kv_is_lost_at_any_moment(seed):
    """Half of the losses void a step in flight and take all slots, the others come between steps and take some."""
    rng = np.random.default_rng(seed)
    serving = Serving(kv_tokens_max=700, slots_max=5, decode_steps_max=4)
    requests = [serving.submit(random_request(rng, f"r{i}", prompt_max=60, answer_max=40)) for i in range(25)]
    for _ in range(30):
        for _ in range(int(rng.integers(0, 6))):
            serving.step()
        lost = {int(slot) for slot in rng.integers(0, 5, 2)}
        if rng.random() < 0.5:
            lost = None
            command = serving.batcher.next_step(serving.now_s)
            if command is not None:
                serving.ranks.run(command)  # carried out, but the answer never comes
                with pytest.raises(ValueError, match="in flight"):
                    serving.batcher.lost_kv({0})
        serving.ranks.lose(lost)
        serving.batcher.lost_kv(lost, serving.now_s, pause_began_s=serving.now_s)
        serving.batcher.check()
    serving.run()
    for request in requests:
        assert serving.tokens(request) == expected_answer(request)
        serving.end(request)


def test_a_late_result_of_a_void_step_is_dropped():
    serving = Serving()
    request = serving.submit(make("r", max_tokens=5))
    command = serving.batcher.next_step(0.0)
    result = serving.ranks.run(command)
    serving.batcher.lost_kv(None, 0.1)
    serving.ranks.lose()
    assert serving.batcher.apply(result, 0.2) == []
    serving.run()
    assert serving.tokens(request) == expected_answer(request)


def test_a_result_that_does_not_fit_its_command_is_refused():
    serving = Serving()
    serving.submit(make("r"))
    command = serving.batcher.next_step(0.0)
    result = serving.ranks.run(command)
    with pytest.raises(ValueError, match="expected slots"):
        serving.batcher.apply(StepResult(command.step, ()), 0.1)
    serving.take(serving.batcher.apply(result, 0.2))
    assert len(serving.events["r"]) == 1


def test_a_request_whose_logits_break_ends_alone():
    serving = Serving()
    broken, sound = serving.submit(make("broken")), serving.submit(make("sound", prompt=[9]))
    serving.step()
    command = serving.batcher.next_step(serving.now_s)
    result = serving.ranks.run(command)
    tokens = tuple(replace(item, tokens=(*item.tokens[:-1], BROKEN_TOKEN)) if item.slot == 0 else item for item in result.tokens)
    serving.take(serving.batcher.apply(replace(result, tokens=tokens), serving.now_s))
    serving.run()
    assert serving.end(broken).finish_reason == "error" and "not finite" in serving.end(broken).detail
    assert serving.tokens(sound) == expected_answer(sound)


def test_cancel_frees_kv_before_the_next_step():
    """With room for one request only, the second takes the room of the first in the step right after the cancellation."""
    serving = Serving(kv_tokens_max=120, slots_max=4)
    first = serving.submit(make("first", prompt=[1] * 20, max_tokens=100))
    second = serving.submit(make("second", prompt=[2] * 20, max_tokens=100))
    serving.step()
    serving.step()
    assert serving.batcher.load(0.0).running == 1
    command = serving.batcher.next_step(serving.now_s)
    assert serving.batcher.cancel("first", serving.now_s)
    serving.take(serving.batcher.apply(serving.ranks.run(command), serving.now_s))
    count = len(serving.tokens(first))
    command = serving.step()
    assert command.releases == (0,)
    assert [part.request_id for part in command.slices] == ["second"]
    assert serving.end(first).finish_reason == "cancelled"
    assert len(serving.tokens(first)) == count
    serving.run()
    assert serving.tokens(second) == expected_answer(second)
    assert not serving.batcher.cancel("first", 0.0)


@pytest.mark.fault("K25")
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_a_request_goes_on_in_another_engine(tokens):
    """Taken out after so many tokens, with a step in flight: both parts together are the undisturbed answer, in text too."""
    here, there = Serving(make_text=Letters), Serving(make_text=Letters)
    stop = Letters.text(expected_answer(make("r", max_tokens=40))[25:28])
    request = here.submit(make("r", max_tokens=40, stop_strings=(stop,)))
    while len(here.tokens(request)) < tokens:
        here.step()
    command = here.batcher.next_step(here.now_s)
    moved = here.batcher.take_out("r", here.now_s)
    assert here.batcher.take_out("r", here.now_s) is None
    here.take(here.batcher.apply(here.ranks.run(command), here.now_s))
    assert here.end(request).finish_reason == "moved" and here.end(request).report.output_tokens == len(moved.answer)
    there.submit(moved)
    there.run()
    events = here.events["r"][:-1] + there.events["r"]
    assert [event.index for event in events if event.token is not None] == list(range(28))
    assert [event.token for event in events if event.token is not None] == expected_answer(request)[:28]
    assert "".join(event.text for event in events) == Letters.text(expected_answer(request)[:25])
    assert events[-1].stop == stop and there.end(request).report.output_tokens == 28


class Letters:
    """A toy detokeniser: a letter per token."""

    @staticmethod
    def text(tokens) -> str:
        return "".join(chr(0x4E00 + token) for token in tokens)

    def push(self, token: int) -> str:
        return self.text([token])

    def finish(self) -> str:
        return ""


def test_cancelling_the_last_request_still_frees_the_ranks():
    serving = Serving()
    serving.submit(make("r", max_tokens=100))
    serving.step()
    serving.batcher.cancel("r", serving.now_s)
    command = serving.step()
    assert command.slices == () and command.releases == (0,)
    assert serving.ranks.slots == {}
    assert serving.step() is None


# --- prefix cache -----------------------------------------------------------------------------------------------------------


def test_prefix_is_copied_from_a_running_and_from_a_retained_slot():
    """200 shared tokens: the second request computes only what differs, whether the first still runs or is over."""
    shared = [int(token) for token in np.random.default_rng(0).integers(0, 40, 200)]
    for is_over in (False, True):
        serving = Serving()
        first = serving.submit(make("first", prompt=[*shared, 41, 42], max_tokens=100))
        serving.run() if is_over else [serving.step() for _ in range(4)]
        before = serving.ranks.prefill_tokens
        second = serving.submit(make("second", prompt=[*shared, 43, 44, 45], max_tokens=1))
        command = serving.step()
        part = next(part for part in command.slices if part.request_id == "second")
        assert part.start == 200 and len(part.tokens) == 3
        assert serving.ranks.prefill_tokens - before <= 3 + 8
        assert [copy.tokens for copy in command.prefix_copies] == [200]
        serving.run()
        assert serving.end(second).report.hit_tokens == 200
        for request in (first, second):
            assert serving.tokens(request) == expected_answer(request)


def test_next_turn_of_a_conversation_takes_the_retained_slot_over_without_a_copy():
    serving = Serving(kv_tokens_max=260)  # no room for two
    first = serving.submit(make("first", prompt=[7] * 100, max_tokens=30))
    serving.run()
    answer = serving.tokens(first)
    second = serving.submit(make("second", prompt=[*first.prompt, *answer, 8, 9], max_tokens=30))
    command = serving.step()
    (new,) = command.new_slots
    assert new.keeps_tokens == 129 and command.prefix_copies == ()  # the answer's last token never got KV
    assert len(command.slices[0].tokens) == 3
    serving.run()
    assert serving.tokens(second) == expected_answer(second)


def test_prefix_of_another_plan_is_no_hit_and_moved_kv_is_one_again():
    prompt = list(range(40)) * 3
    serving = Serving()
    serving.submit(make("first", prompt=prompt, max_tokens=60))
    serving.step()
    serving.step()
    serving.batcher.use_plan(1)
    serving.submit(make("second", prompt=[*prompt, 5], max_tokens=40))
    command = serving.step()
    assert {part.plan_version for part in command.slices} == {0, 1}
    assert command.prefix_copies == ()
    assert serving.batcher.live_versions() == (0, 1)
    moved = serving.batcher.slots_of_plan(0)
    serving.batcher.moved_kv(moved, 1)
    for slot in moved:
        serving.ranks.slots[slot].new = command_new(serving, slot, 1)
    assert serving.batcher.live_versions() == (1,)
    serving.submit(make("third", prompt=[*prompt, 6], max_tokens=4))
    assert serving.step().prefix_copies != ()
    serving.run()


def command_new(serving: Serving, slot: int, version: int):
    return replace(serving.ranks.slots[slot].new, plan_version=version)


def test_retained_slots_make_room_least_recently_used_first():
    serving = Serving(kv_tokens_max=400, slots_max=8, growth_tokens=1)
    for name in "abc":
        serving.submit(make(name, prompt=[ord(name) % 40] * 90, max_tokens=10))
        serving.run()
    serving.submit(make("a2", prompt=[ord("a") % 40] * 95, max_tokens=2))  # a is used again
    serving.run()
    serving.submit(make("d", prompt=[5] * 150, max_tokens=10))
    command = serving.step()
    assert command.releases == (1,)  # slot of b
    serving.run()


# --- limits at the door -----------------------------------------------------------------------------------------------------


@pytest.mark.fault("K10")
def test_requests_that_can_never_fit_are_refused_and_block_nobody(shared):
    """Context 8,192, pool 4,096: rows 2, 3 and 5 of the trace need 9,010, 4,200 and 8,400 tokens."""
    rows = (shared / "cases" / "inputs" / "trace_too_long.csv").read_text().splitlines()[1:]
    sizes = [tuple(int(value) for value in row.split(",")[1:3]) for row in rows]
    serving = Serving(context_tokens=8192, kv_tokens_max=4096, slots_max=8, chunk_tokens_max=2048)
    served, refused = [], []
    for number, (prompt, answer) in enumerate(sizes, 1):
        request = make(str(number), prompt=[number] * prompt, max_tokens=answer)
        try:
            served.append(serving.submit(request))
        except Refused as error:
            assert error.reason == "too_long" and "4096" in str(error)
            refused.append(number)
    assert refused == [2, 3, 5]
    serving.run(20_000)
    assert [serving.end(request).finish_reason for request in served] == ["length"] * 3


def test_refusals_name_what_is_wrong():
    serving = Serving(queue_limit=2, slots_max=1)
    for request, reason in (
        (make("a", prompt=[50]), "invalid"),
        (make("b", stop_strings=("x",)), "invalid"),
        (make("c", deadline_s=0.0), "deadline_passed"),
        (make("d", max_tokens=510), "too_long"),
    ):
        with pytest.raises(Refused) as caught:
            serving.submit(request)
        assert caught.value.reason == reason
    serving.submit(make("e"))
    with pytest.raises(Refused, match="id of its own"):
        serving.submit(make("e"))
    serving.submit(make("f"))
    with pytest.raises(Refused) as caught:
        serving.submit(make("g"))
    assert caught.value.reason == "queue_full"
    serving.run()
    serving.submit(make("e"))  # an id is free again once its request has ended


def test_deadline_ends_waiting_and_running_requests():
    serving = Serving(slots_max=1)
    running = serving.submit(make("running", max_tokens=400, deadline_s=0.5))
    waiting = serving.submit(make("waiting", deadline_s=0.2))
    serving.run()
    for request in (running, waiting):
        assert serving.end(request).finish_reason == "deadline"
    assert 20 < len(serving.tokens(running)) < 60
    assert serving.tokens(waiting) == []


# --- preemption and starvation ----------------------------------------------------------------------------------------------


@pytest.mark.fault("K09")
@pytest.mark.parametrize("blocks", [0, 1, 17, 33, 125, 500, 2200])
def test_too_little_kv_ends_with_every_request_accounted_for(shared, blocks):
    """200 requests at once into `blocks` x 16 tokens, answers expected far too short, so that all want to grow at once: it ends, and
    nobody is displaced more often than preemptions_max, and once more by its own growth."""
    case = json.loads((shared / "cases" / "inputs" / "kv_tiny.json").read_text())
    load, worker = case["load"], case["workers"][0]
    serving = Serving(
        context_tokens=case["max_context_tokens"],
        kv_tokens_max=blocks * worker["block_tokens"],
        slots_max=worker["max_running"],
        queue_limit=load["requests"],
        burst_s=1.0,
    )
    for _ in range(3000):
        serving.batcher.lengths.observe(0, 5)
    requests, refused = [], 0
    for number in range(load["requests"]):
        request = make(str(number), prompt=[number % 40] * load["prompt_tokens"], max_tokens=load["output_tokens"])
        try:
            requests.append(serving.submit(request))
        except Refused:
            refused += 1
    serving.run(40_000)
    assert len(requests) + refused == load["requests"]
    assert (refused == load["requests"]) == (blocks * 16 < 512)
    for request in requests:
        assert serving.end(request).finish_reason == "length"
        bound = min(serving.batcher.settings.preemptions_max + 1, case["expect"]["no_request_preempted_more_than"])
        assert serving.end(request).report.preemptions <= bound


def test_growth_displaces_the_latest_and_loses_nothing():
    """Lengths are expected short and turn out long: the pool runs out, later requests step back, all answers are whole."""
    serving = Serving(kv_tokens_max=600, slots_max=8, growth_tokens=16, retains_prefixes=False)
    for _ in range(3000):
        serving.batcher.lengths.observe(0, 5)
    requests = [serving.submit(make(f"r{i}", prompt=[i] * 10, max_tokens=200)) for i in range(6)]
    serving.run()
    assert serving.batcher.preemptions > 0
    for request in requests:
        assert serving.tokens(request) == expected_answer(request)
    assert serving.end(requests[0]).report.preemptions == 0
    assert max(serving.end(request).report.preemptions for request in requests) == 1  # let in again with all it may need
    assert serving.end(requests[-1]).report.recomputed_tokens > 0


def test_a_request_let_in_and_displaced_within_one_step_leaves_no_trace():
    """The first grows into the room that the second has just been given: the ranks never hear of the second."""
    serving = Serving(kv_tokens_max=100, growth_tokens=1, decode_steps_max=1, retains_prefixes=False, priority_slots=0)
    for _ in range(3000):
        serving.batcher.lengths.observe(0, 1)
    first = serving.submit(make("first", prompt=[1] * 10, max_tokens=60))
    for _ in range(30):
        serving.step()
        reserved = serving.batcher.load(0.0).kv_tokens_running
        if reserved + 1 == len(first.prompt) + len(serving.tokens(first)):  # full: the next step has to grow
            break
    second = serving.submit(make("second", prompt=[2] * (99 - reserved), max_tokens=1))
    command = serving.step()
    assert serving.batcher.preemptions == 1
    assert command.new_slots == () and command.releases == () and [part.request_id for part in command.slices] == ["first"]
    serving.run()
    for request in (first, second):
        assert serving.tokens(request) == expected_answer(request)


def test_priority_displaces_lower_priority_at_once_and_equal_priority_waits():
    serving = Serving(kv_tokens_max=300, slots_max=8, growth_tokens=300, priority_slots=0)
    low = serving.submit(make("low", prompt=[1] * 20, max_tokens=270))
    serving.step()
    serving.step()
    equal = serving.submit(make("equal", prompt=[2] * 20, max_tokens=230))
    assert serving.step().new_slots == ()
    high = serving.submit(make("high", prompt=[3] * 20, max_tokens=50, priority=2))
    command = serving.step()
    assert [part.request_id for part in command.slices] == ["high"]
    serving.run()
    for request in (low, equal, high):
        assert serving.tokens(request) == expected_answer(request)
    assert serving.end(low).report.preemptions == 1
    finish_s = [serving.end(request).report.finish_s for request in (high, low, equal)]
    assert finish_s == sorted(finish_s)


def test_what_waited_elsewhere_counts_in_the_queue_and_displaces_nobody():
    """It comes 5 s late, having waited 100 s in another group: before those that wait here, and after those that run."""
    serving = Serving(kv_tokens_max=300, slots_max=8, growth_tokens=300, priority_slots=0)
    runs = serving.submit(make("runs", prompt=[1] * 20, max_tokens=270))
    serving.step()
    waits = serving.submit(make("waits", prompt=[2] * 20, max_tokens=230))
    serving.now_s += 5.0
    moved = serving.submit(replace(make("moved", prompt=[3] * 20, max_tokens=230), waited_s=100.0))
    serving.run()
    assert serving.end(runs).report.preemptions == 0
    finish_s = [serving.end(request).report.finish_s for request in (runs, moved, waits)]
    assert finish_s == sorted(finish_s)


def test_a_slot_is_kept_for_priority():
    serving = Serving(slots_max=3, priority_slots=1)
    for name in "abcd":
        serving.submit(make(name, max_tokens=50))
    serving.step()
    assert serving.batcher.load(0.0).running == 2
    serving.submit(make("urgent", priority=1))
    command = serving.step()
    assert "urgent" in {part.request_id for part in command.slices}
    assert serving.batcher.preemptions == 0
    serving.run()


@pytest.mark.parametrize("is_old", [False, True], ids=["fresh queue", "starving queue"])
def test_above_normal_priority_begins_in_the_next_step_though_all_is_full(is_old):
    """8 slots, 2048 tokens: 7 and 1792 for normal priority. A long prompt is being computed, 20 requests wait, some of them too long."""
    serving = Serving(retains_prefixes=False)
    for number in range(26):
        serving.submit(make(f"normal-{number}", prompt=[number] * (400 if number % 5 == 4 else 250), max_tokens=112))
    serving.step()
    serving.step()
    load = serving.batcher.load(serving.now_s)
    assert load.running > load.decoding and load.kv_tokens_running <= 1792 < load.kv_tokens_running + 362, "not full"
    if is_old:
        serving.now_s += serving.batcher.settings.starve_after_s + 20.0
    serving.submit(make("urgent", prompt=[45] * 100, max_tokens=140, priority=1))
    assert "urgent" in {part.request_id for part in serving.step().slices}
    assert serving.batcher.preemptions == 0 or is_old  # starving ones displace each other
    serving.run()


def test_what_is_kept_for_priority_is_a_slot_in_four_or_more_and_its_part_of_the_pool():
    def kept(**settings: int) -> tuple[int, int]:
        chosen = BatcherSettings(context_tokens=512, **{"kv_tokens_max": 1200, **settings})
        return chosen.kept_slots, chosen.kept_kv_tokens

    assert [kept(slots_max=slots) for slots in (1, 3, 4, 12)] == [(0, 0), (0, 0), (1, 300), (1, 100)]
    assert kept(slots_max=8, priority_slots=2) == (2, 300) and kept(slots_max=8, priority_kv_tokens=50) == (1, 50)
    for wrong in ({"priority_slots": 8}, {"priority_slots": -1}, {"priority_kv_tokens": 1201}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            kept(slots_max=8, **wrong)


def test_a_request_that_needs_the_whole_pool_is_served_beside_a_flood_above_normal_priority():
    """What is kept for others is not kept from one that runs alone; it displaces those that came later once it starves."""
    serving = Serving(kv_tokens_max=400, retains_prefixes=False)
    large = serving.submit(make("large", prompt=[9] * 100, max_tokens=300))
    number = 0
    while not any(event.finish_reason for event in serving.events["large"]):
        while serving.batcher.load(serving.now_s).waiting < 4:
            serving.submit(make(f"urgent-{number}", prompt=[number % 40] * 10, max_tokens=30, priority=1))
            number += 1
        serving.step()
        assert serving.now_s < 60, "starved"
    assert serving.tokens(large) == expected_answer(large)


@pytest.mark.parametrize("flood_priority", [0, 3])
def test_a_large_request_is_not_starved_by_a_flood_of_small_ones(flood_priority):
    """It needs the whole pool; small ones, of its own or higher priority, arrive faster than they are served for ever.

    Bound: starve_after_s, the head start of the flood's priority, and the work that has the earlier key by then.
    """
    serving = Serving(kv_tokens_max=400, slots_max=8, retains_prefixes=False)
    settings = serving.batcher.settings
    serving.submit(make("small-0", max_tokens=40, priority=flood_priority))
    serving.step()
    large = serving.submit(make("large", prompt=[9] * 100, max_tokens=290))
    number = 1
    while not serving.events["large"]:
        while serving.batcher.load(serving.now_s).waiting < 20:
            serving.submit(make(f"small-{number}", prompt=[number % 40] * 10, max_tokens=40, priority=flood_priority))
            number += 1
        serving.step()
        assert serving.now_s < 60, "starved"
    bound_s = settings.starve_after_s + flood_priority * settings.head_start_s + 20 * 40 * 0.015
    assert serving.events["large"][0].report is None
    assert serving.now_s < bound_s
    for _ in range(400):
        serving.step()
    assert serving.end(large).finish_reason == "length" or serving.end(large).report.preemptions <= settings.preemptions_max
    assert serving.tokens(large) == expected_answer(large)


# --- several passes, chunks, batch size -------------------------------------------------------------------------------------


def test_a_calm_batch_runs_ahead_and_anything_that_waits_ends_it():
    serving = Serving(burst_s=1.0)
    request = serving.submit(make("r", max_tokens=40))
    serving.step()
    assert [serving.step().decode_steps for _ in range(4)] == [1, 2, 4, 8][:4] or serving.commands[-1].decode_steps == 8
    serving.submit(make("s", max_tokens=10))
    assert serving.step().decode_steps == 1
    serving.run()
    assert serving.tokens(request) == expected_answer(request)
    for command in serving.commands:
        assert command.decode_steps <= 8


def test_a_run_ends_exactly_at_the_token_limit_and_within_the_burst():
    serving = Serving(burst_s=0.045)  # of steps of about 10.5 ms: four
    request = serving.submit(make("r", max_tokens=30))
    serving.run()
    assert len(serving.tokens(request)) == 30
    assert max(command.decode_steps for command in serving.commands) == 4
    assert serving.ranks.passes == 30


def test_tokens_beyond_a_stop_are_dropped():
    serving = Serving(burst_s=1.0)
    requests = [serving.submit(make(f"r{i}", prompt=[i], max_tokens=200, ignore_eos=False)) for i in range(6)]
    serving.run()
    for request in requests:
        assert serving.tokens(request) == expected_answer(request)


def learned(serving: Serving, steps: int = 60) -> None:
    """Let the pace see decode steps and prompts."""
    for rows in range(steps):
        for prefill in (0, 16, 64, 256):
            serving.batcher.pace.observe(rows % 8 + 1, prefill, serving.step_s(rows % 8 + 1, prefill))


def test_chunks_are_small_when_calm_and_grow_to_the_tpot_limit_under_pressure():
    """Decode 10.5 ms, 0.2 ms per prompt token, TPOT limit 80 ms x 0.8 headroom (code): calm chunks add half a step (26 tokens),
    pressed ones up to (64 - 10.5) / 0.2 = 267 tokens."""
    code = CLASS_INDEX["code"]
    serving = Serving(context_tokens=4096, kv_tokens_max=40_000, slots_max=32)
    learned(serving)
    serving.submit(make("running", max_tokens=2000, class_index=code))
    serving.step()
    serving.submit(make("prompt", prompt=[4] * 300, max_tokens=2, class_index=CLASS_INDEX["batch"]))
    calm = max(len(part.tokens) for part in serving.step().slices)
    assert 16 <= calm <= 40
    for number in range(20):
        serving.submit(make(f"p{number}", prompt=[number] * 2000, max_tokens=2, class_index=code))
    pressed = sum(len(part.tokens) for part in serving.step().slices if len(part.tokens) > 1)
    assert 200 <= pressed <= 290
    limit_s = SERVICE_CLASSES[code].tpot_limit_s
    rows = [sum(len(part.tokens) for part in command.slices) for command in serving.commands]
    assert all(serving.step_s(1, tokens) <= limit_s for tokens in rows[1:])


def test_prompts_alone_are_chunked_by_step_s_max():
    serving = Serving(context_tokens=4096, kv_tokens_max=8192, step_s=lambda rows, prefill: 0.01 + 0.005 * prefill, chunk_tokens_max=512)
    learned(serving)
    serving.submit(make("long", prompt=[4] * 1000, max_tokens=2))
    first = len(serving.step().slices[0].tokens)
    assert 80 <= first <= 110  # 0.5 s at 5 ms per token


def test_batch_grows_only_as_far_as_the_tpot_limit():
    """Base 10 ms, 10 ms per row, limit 80 ms x 0.8 for code: 5 rows; batch class allows 240 ms: 23 rows."""
    for name, rows in (("code", 5), ("batch", 23)):
        serving = Serving(slots_max=32, kv_tokens_max=20_000, step_s=lambda rows, prefill: 0.010 + 0.010 * rows + 0.0001 * prefill)
        learned(serving)
        for number in range(30):
            serving.submit(make(f"r{number}", prompt=[number], max_tokens=50, class_index=CLASS_INDEX[name]))
        serving.step()
        assert abs(serving.batcher.load(0.0).running - rows) <= 1
        serving.run()


def test_limits_that_one_row_cannot_meet_are_multiplied_not_given_up():
    """One row takes 300 ms, three times the chat limit: without the multiplier no batch would ever form."""
    serving = Serving(slots_max=8, step_s=lambda rows, prefill: 0.3 + 0.001 * rows)
    learned(serving)
    for number in range(6):
        serving.submit(make(f"r{number}", prompt=[number], max_tokens=5))
    serving.step()
    assert serving.batcher.load(0.0).running == 6
    serving.run()


# --- times ------------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("K11")
def test_first_token_time_counts_the_queue():
    """100 requests at once on one slot: arrival <= admitted <= first token <= end, and the parts add up to the whole."""
    serving = Serving(slots_max=1, queue_limit=100)
    requests = [serving.submit(make(f"r{i}", max_tokens=4)) for i in range(100)]
    serving.run()
    for number, request in enumerate(requests):
        report = serving.end(request).report
        assert report.arrival_s <= report.admitted_s <= report.first_token_s <= report.finish_s
        assert report.unexplained_s == pytest.approx(0.0, abs=1e-9)
        assert report.ttft_s >= number * 4 * 0.010
        assert report.part("queue_s") == pytest.approx(report.admitted_s - report.arrival_s)


def test_parts_come_from_the_slowest_rank_and_add_up():
    serving = Serving()
    serving.submit(make("r", prompt=[1] * 30, max_tokens=3))
    for number in range(3):
        began_s = 1.0 + number
        command = serving.batcher.next_step(began_s - 0.1)
        result = serving.ranks.run(command)
        fast = RankTimings(0, 0.1, 0.05, 0.60, 0.05)
        slow = RankTimings(1, 0.4, 0.20, 0.15, 0.05)
        full = StepResult(result.step, result.tokens, (fast, slow), began_s, began_s + 0.81)  # 10 ms on the way
        serving.take(serving.batcher.apply(full, began_s + 0.86))
    report = serving.events["r"][-1].report
    named = dict(zip(LATENCY_PARTS, report.parts, strict=True))
    assert named["queue_s"] == pytest.approx(0.9)
    assert named["prefill_compute_s"] == pytest.approx(0.4)
    assert named["decode_compute_s"] == pytest.approx(0.8)
    assert named["memory_stall_s"] == pytest.approx(0.6)
    assert named["communication_s"] == pytest.approx(0.45)
    assert named["return_s"] == pytest.approx(0.15)
    assert named["host_s"] == pytest.approx(3 * (0.05 + 0.01) + 0.1 + 2 * 0.14)
    assert report.unexplained_s == pytest.approx(0.0, abs=1e-9)


def test_a_recovery_is_a_pause_and_what_is_computed_again_is_redone():
    serving = Serving(burst_s=0.001)
    request = serving.submit(make("r", prompt=[1] * 30, max_tokens=10))
    for _ in range(4):
        serving.step()
    serving.batcher.next_step(serving.now_s)
    began_s = serving.now_s
    serving.now_s += 2.0
    serving.ranks.lose()
    serving.batcher.lost_kv(None, serving.now_s, pause_began_s=began_s)
    serving.run()
    report = serving.end(request).report
    assert report.part("pause_s") == pytest.approx(2.0)
    assert report.part("redone_s") == pytest.approx(serving.step_s(0, 34))
    assert report.recoveries == 1 and report.recomputed_tokens == 33
    assert report.unexplained_s == pytest.approx(0.0, abs=1e-9)


# --- pool and failure -------------------------------------------------------------------------------------------------------


def test_fail_all_ends_everything_once():
    serving = Serving(slots_max=2)
    requests = [serving.submit(make(f"r{i}", max_tokens=30)) for i in range(5)]
    serving.step()
    serving.batcher.fail_all("no rank left", serving.now_s)
    serving.ranks.lose()
    serving.batcher.lost_kv(None, serving.now_s)
    serving.take(serving.batcher.drain_events())
    for request in requests:
        assert serving.end(request).finish_reason == "error"
    assert serving.batcher.is_idle
    serving.batcher.check()


def test_seed_is_the_callers_or_follows_from_the_id():
    assert make("a").seed == make("a").seed != make("b").seed
    assert make("a", sampling=SamplingSettings(seed=5)).seed == 5


# --- pace -------------------------------------------------------------------------------------------------------------------


def test_pace_learns_the_three_coefficients_and_follows_a_change():
    pace = StepPace()
    rng = np.random.default_rng(1)
    for factor in (1.0, 3.0):
        for _ in range(300):
            rows, prefill = int(rng.integers(0, 9)), int(rng.integers(0, 2) * rng.integers(16, 256))
            seconds = factor * (0.020 + 0.002 * rows + 0.0004 * prefill) * (1 + 0.02 * rng.standard_normal())
            pace.observe(rows, prefill, seconds)
        assert pace.base_s == pytest.approx(0.020 * factor, rel=0.1)
        assert pace.token_s == pytest.approx(0.0004 * factor, rel=0.1)
        assert pace.step_s(8, 100) == pytest.approx(factor * 0.076, rel=0.05)


@pytest.mark.parametrize("rows_max", [1, 5])
@pytest.mark.parametrize("prefill_share", [0.1, 0.001, 0.0])
def test_pace_stays_right_over_a_long_run(rows_max, prefill_share):
    """20,000 steps with few prompts, a stall every hundredth: the expected time of a step is still that of the steps, and follows when all
    become twice as slow."""
    pace, rng = StepPace(), np.random.default_rng(3)
    for count, factor in ((20_000, 1.0), (500, 2.0)):
        for _ in range(count):
            rows, prefill = (0, int(rng.integers(2, 90))) if rng.random() < prefill_share else (int(rng.integers(1, rows_max + 1)), 0)
            stall_s = 0.05 * (rng.random() < 0.01)
            pace.observe(rows, prefill, factor * (0.0008 + 0.0002 * rows + 0.00001 * prefill + rng.exponential(0.0001)) + stall_s)
        assert pace.step_s(1) == pytest.approx(0.0011 * factor, rel=0.25)
        assert np.isfinite(pace.token_s) and pace.token_s < 0.002


def test_one_stall_hardly_moves_the_pace_and_nonsense_is_left_out():
    pace = StepPace()
    for _ in range(100):
        pace.observe(4, 0, 0.05)
    before = pace.step_s(4)
    pace.observe(4, 0, 50.0)
    for seconds in (math.nan, math.inf, -1.0, 0.0):
        pace.observe(4, 0, seconds)
    assert pace.step_s(4) < 2 * before
