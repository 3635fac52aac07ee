"""Continuous batching: which requests run, what each step computes, what becomes of its tokens.

Pure: no torch, no processes, no clock of its own. The engine asks for a step, has the ranks carry it out, hands back what came of it.
Everything a request needs to be begun again lies here as token ids, so that nothing is lost with a rank.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import replace

from envs.decision.length_estimator import LengthEstimator
from runtime.torch_tp.batcher_settings import BatcherSettings, Load
from runtime.torch_tp.requests import GenerationRequest, Refused, TokenEvent, TokenLogprobs
from runtime.torch_tp.resident import HOST, PAUSE, Resident
from runtime.torch_tp.slot_pool import SlotPool, Taken
from runtime.torch_tp.step_budget import StepBudget
from runtime.torch_tp.step_pace import StepPace
from runtime.torch_tp.steps import BROKEN_TOKEN, SliceCommand, SlotTokens, StepCommand, StepResult
from runtime.torch_tp.stop_strings import AnswerText, TokenText

__all__ = ["Batcher", "BatcherSettings", "Load"]

PASSING_MAX = 8  # so many of the queue are tried while its first does not fit


class Batcher:
    """Owns every request from submit to its last event. Not for several threads at once.

    The cycle: `next_step` -> (ranks) -> `apply`, or `lost_kv` when the step failed. `submit`, `cancel` and the rest may come at any
    point of it. Events of requests that end otherwise than by a token (cancelled, expired) come with the next `drain_events`.
    """

    def __init__(
        self,
        settings: BatcherSettings,
        *,
        plan_version: int = 0,
        make_text: Callable[[], TokenText] | None = None,
        pace: StepPace | None = None,
        lengths: LengthEstimator | None = None,
    ) -> None:
        """make_text: a fresh detokeniser per answer; None gives events without text."""
        self.settings = settings
        self.pace = pace or StepPace()
        self.lengths = lengths or LengthEstimator()
        self.plan_version = plan_version
        self.prefix_hit_tokens = 0
        self.preemptions = 0
        self._make_text = make_text
        self._pool = SlotPool(settings.slots_max, settings.kv_tokens_max, settings.block_tokens)
        self._budget = StepBudget(settings, self.pace)
        self._residents: dict[str, Resident] = {}
        self._waiting: list[Resident] = []  # by key
        self._running: dict[int, Resident] = {}  # by slot
        self._events: list[TokenEvent] = []
        self._in_flight: StepCommand | None = None
        self._submitted = 0
        self._finished = 0
        self._step = 0
        self._calm_steps = 0  # steps since the batch last changed
        self._tried_after = (0, 0, 0)  # what had happened when others last tried to pass the first of the queue
        self.lengths.expected_remaining(0, 0)  # compiled now, not under the first request

    # --- callers ------------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, now_s: float) -> None:
        """Take a request in. Raises: Refused, with the limit that it would break."""
        self._check_acceptable(request, now_s)
        settings = self.settings
        text = AnswerText(self._make_text() if self._make_text else None, request.stop_strings)
        stop_ids = frozenset(request.stop_ids) | (frozenset() if request.ignore_eos else frozenset(settings.eos_ids))
        key = (now_s - request.priority * settings.head_start_s, self._submitted)
        resident = Resident(request, key, text, stop_ids, now_s)
        self._submitted += 1
        self._residents[request.request_id] = resident
        self._enqueue(resident)

    def _check_acceptable(self, request: GenerationRequest, now_s: float) -> None:
        if request.request_id in self._residents:
            raise Refused("duplicate", f"request {request.request_id!r} is still being served; give every request an id of its own")
        self.settings.check(request, has_text=self._make_text is not None)
        if request.deadline_s is not None and request.deadline_s <= now_s:
            raise Refused("deadline_passed", f"the deadline passed {now_s - request.deadline_s:.3f} s ago")
        if len(self._waiting) >= self.settings.queue_limit:
            raise Refused("queue_full", f"{len(self._waiting)} requests are waiting already; try again later")

    def cancel(self, request_id: str, now_s: float) -> bool:
        """End a request; its KV is free for the very next step. False where no such request is being served."""
        resident = self._residents.get(request_id)
        if resident is None:
            return False
        self._end(resident, "cancelled", now_s)
        return True

    def take_out(self, request_id: str, now_s: float) -> GenerationRequest | None:
        """Give a request up so that another engine can go on with it; None where none of that id is served here.

        Returns: the request with its answer so far; a step in flight adds nothing to it any more.
        """
        resident = self._residents.get(request_id)
        if resident is None:
            return None
        moved = replace(resident.request, answer=tuple(resident.ids[len(resident.request.prompt) :]))
        self._end(resident, "moved", now_s)
        return moved

    def fail(self, request_id: str, detail: str, now_s: float) -> None:
        """End a request with the reason "error"; no-op where none of that id is served."""
        if request_id in self._residents:
            self._end(self._residents[request_id], "error", now_s, detail=detail)

    def fail_all(self, detail: str, now_s: float) -> None:
        """End every request with the reason "error": there is nobody left to serve them."""
        self._in_flight = None
        for resident in list(self._residents.values()):
            self._end(resident, "error", now_s, detail=detail)

    def drain_events(self) -> list[TokenEvent]:
        """Events since the last call or `apply`."""
        events, self._events = self._events, []
        return events

    # --- the cycle ----------------------------------------------------------------------------------------------------------

    def next_step(self, now_s: float) -> StepCommand | None:
        """What the ranks shall do next; None when there is nothing. Its result, or `lost_kv`, must come before the next call."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step} is still in flight; apply its result or report its KV lost")
        self._expire(now_s)
        self._admit(now_s)
        slices, decode_steps = self._compose(now_s)
        if not self._residents:
            self.check()
        if not (slices or self._pool.has_releases):
            return None
        self._step += 1
        command = StepCommand(self._step, tuple(slices), decode_steps, **self._pool.take_orders())
        self._in_flight = command
        return command

    def apply(self, result: StepResult, now_s: float) -> list[TokenEvent]:
        """Take in what a step brought; returns the events due, oldest first. A result of any other step than the last is dropped."""
        command = self._in_flight
        if command is None or command.step != result.step:
            return self.drain_events()
        tokens_of = self._tokens_by_slot(command, result)
        self._in_flight = None
        self._learn_pace(command, result)
        slowest = max(result.timings, key=lambda timings: timings.busy_s, default=None)
        parts = {part.slot: part for part in command.slices}
        for slot, resident in list(self._running.items()):
            part = parts.get(slot)
            took_part = part is not None and part.request_id == resident.request_id
            is_redone = part is not None and part.start < resident.redo_below
            resident.spend_step(result.began_s, result.ended_s, slowest, took_part, is_redone)
            if part is None or not took_part:  # the slot may have changed hands since: its request was cancelled
                continue
            if part.wants_sample:
                self._take_tokens(resident, tokens_of[slot], now_s)
            else:
                resident.computed = part.start + len(part.tokens)
            if resident.slot is not None:
                self._pool.holds(slot, resident.ids, resident.computed)
        return self.drain_events()

    def lost_kv(self, slots: Iterable[int] | None = None, now_s: float | None = None, *, pause_began_s: float | None = None) -> None:
        """The ranks no longer hold these slots (None: any): their requests are computed again from their token ids.

        The slots count as free at the ranks. A step in flight is void; since nobody knows how far the ranks got with it, all slots
        are lost with it. pause_began_s to now_s: nothing ran, e.g. for a recovery.
        """
        if slots is not None and self._in_flight is not None:
            raise ValueError(f"lost_kv: step {self._in_flight.step} is in flight; with it every slot is lost, pass slots=None")
        if pause_began_s is not None and now_s is not None:
            self.note_pause(pause_began_s, now_s)
        self._in_flight = None
        for slot in self._pool.lost(slots):
            resident = self._running.pop(slot, None)
            if resident is not None:
                resident.recoveries += 1
                self._begin_again(resident, now_s)
        self._calm_steps = 0

    def note_pause(self, began_s: float, ended_s: float) -> None:
        """Nothing ran between these times: a re-split, a recovery. A step in flight came to nothing: its time counts too."""
        for resident in self._running.values():
            resident.spend_until(began_s, HOST if self._in_flight is None else PAUSE)
            resident.spend_until(ended_s, PAUSE)

    # --- plans and pool -----------------------------------------------------------------------------------------------------

    def use_plan(self, version: int) -> None:
        """Requests admitted from now on use this plan; those running keep theirs."""
        self.plan_version = version

    def slots_of_plan(self, version: int) -> tuple[int, ...]:
        """Slots whose KV lies by the head ranges of this plan, running and retained."""
        return self._pool.of_plan(version)

    def live_versions(self) -> tuple[int, ...]:
        """Plan versions in use, ascending."""
        return tuple(sorted({self.plan_version, *self._pool.versions}))

    def moved_kv(self, slots: Iterable[int], version: int) -> None:
        """The ranks moved the KV of these slots to the head ranges of another plan; nothing else about them changed."""
        for slot in self._pool.moved(slots, version):
            if slot in self._running:
                self._running[slot].plan_version = version

    def drop_retained(self) -> None:
        """Give up KV kept for reuse."""
        self._pool.drop_retained()

    # --- views --------------------------------------------------------------------------------------------------------------

    @property
    def request_ids(self) -> set[str]:
        """Of all requests being served."""
        return set(self._residents)

    @property
    def is_idle(self) -> bool:
        return not self._residents

    def load(self, now_s: float) -> Load:
        running = self._running.values()
        return Load(
            waiting=len(self._waiting),
            running=len(self._running),
            decoding=sum(1 for s in running if s.pending == 1),
            kv_tokens_running=self._pool.tokens_running,
            kv_tokens_retained=self._pool.tokens_retained,
            prefill_backlog_tokens=sum(s.pending for s in self._residents.values() if s.pending > 1),
            oldest_wait_s=max((now_s - s.queued_s for s in self._waiting), default=0.0),
        )

    def check(self) -> None:
        """Raise AssertionError unless everything is conserved: slots, KV tokens, requests, answer tokens."""
        self._pool.check(self._running)
        waiting = {s.request_id for s in self._waiting}
        running = {s.request_id for s in self._running.values()}
        assert len(waiting) == len(self._waiting) and not waiting & running, "a request waits twice, or waits and runs"
        assert waiting | running == set(self._residents), "a request neither waits nor runs"
        assert self._submitted == self._finished + len(self._residents), "a request ended twice or never"
        assert self._waiting == sorted(self._waiting, key=lambda s: s.key), "the queue is out of order"
        for slot, resident in self._running.items():
            assert resident.slot == slot and 0 <= resident.computed < len(resident.ids), f"slot {slot}: KV beyond the ids"
            assert resident.computed <= self._pool.reserved(slot), f"slot {slot}: more KV than was reserved"
            assert resident.plan_version == self._pool.version_of(slot), f"slot {slot}: two plan versions"

    # --- admission ----------------------------------------------------------------------------------------------------------

    def _enqueue(self, resident: Resident) -> None:
        insort(self._waiting, resident, key=lambda s: s.key)

    def _expire(self, now_s: float) -> None:
        for resident in list(self._residents.values()):
            deadline_s = resident.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._end(resident, "deadline", now_s, detail=f"not done {deadline_s - resident.arrival_s:.3f} s after it was submitted")

    def _admit(self, now_s: float) -> None:
        """Let waiting requests in by their keys. While the first does not fit, later ones may pass it, unless it starves."""
        while self._waiting:
            head = self._waiting[0]
            if self._try_admit(head, now_s) or self._displace_for(head, now_s):
                continue
            changes = (self._submitted, self._finished, self.preemptions)  # room comes with one of these
            if now_s - head.queued_s < self.settings.starve_after_s and changes != self._tried_after:
                for resident in self._waiting[1 : 1 + PASSING_MAX]:
                    self._try_admit(resident, now_s)
                self._tried_after = changes
            return

    def _try_admit(self, resident: Resident, now_s: float) -> bool:
        if not self._batch_has_room(resident):
            return False
        taken = self._pool.take(resident.ids, self.plan_version, self._tokens_to_reserve(resident))
        if taken is not None:
            self._start(resident, taken, now_s)
        return taken is not None

    def _batch_has_room(self, resident: Resident, displaced: int = 0) -> bool:
        """One more row must leave every step inside the TPOT limits, and the priority slots to those with priority.

        displaced: running requests that would go.
        """
        rows = len(self._running) - displaced + 1
        if rows == 1:
            return True
        reserved_slots = 0 if resident.request.priority > 0 else min(self.settings.priority_slots, self.settings.slots_max - 1)
        if not self._pool.has_room_beyond(reserved_slots - displaced):
            return False
        rows_max = min(self._budget.rows(self._running.values()), self._budget.rows([resident]))
        return rows <= rows_max + (resident.request.priority > 0)

    def _tokens_to_reserve(self, resident: Resident) -> int:
        """Room for what it has and what its class is expected to add; for one displaced before, all it may ever need."""
        whole = resident.request.tokens_needed
        if resident.preemptions:
            return whole
        expected = math.ceil(self.lengths.expected_remaining(resident.request.class_index, resident.output_tokens))
        portion = self.settings.growth_tokens
        return min(whole, len(resident.ids) + -(-expected // portion) * portion)

    def _start(self, resident: Resident, taken: Taken, now_s: float) -> None:
        self._waiting.remove(resident)
        self._running[taken.slot] = resident
        resident.start(taken.slot, self.plan_version, taken.held, now_s)
        self.prefix_hit_tokens += taken.held
        self._pool.fill(resident.new_slot(self._pool.reserved(taken.slot), taken.keeps))
        self._calm_steps = 0

    # --- making room --------------------------------------------------------------------------------------------------------

    def _may_displace(self, victim: Resident, for_: Resident) -> bool:
        return victim.key > for_.key and victim.preemptions < self.settings.preemptions_max and victim.slot not in self._pool.pinned

    def _victims(self, for_: Resident) -> list[Resident]:
        """Running requests that `for_` may displace, the latest first."""
        return sorted((s for s in self._running.values() if self._may_displace(s, for_)), key=lambda s: s.key, reverse=True)

    def _displace_for(self, head: Resident, now_s: float) -> bool:
        """Let the first of the queue in at the cost of later ones: at once those of lower priority, any once it starves."""
        starves = now_s - head.queued_s >= self.settings.starve_after_s
        victims = [s for s in self._victims(head) if starves or s.request.priority < head.request.priority]
        if not victims:
            return False
        wanted = self._tokens_to_reserve(head)
        chosen: list[Resident] = []
        gained = 0
        for victim in victims:
            chosen.append(victim)
            assert victim.slot is not None
            gained += self._pool.reserved(victim.slot)
            if self._pool.could_fit(wanted - gained) and self._batch_has_room(head, displaced=len(chosen)):
                break
        else:
            return False
        for victim in chosen:
            self._preempt(victim, now_s)
        return self._try_admit(head, now_s)

    def _preempt(self, resident: Resident, now_s: float) -> None:
        """Take a running request off; it keeps its place in the queue and is computed again from its ids."""
        assert resident.slot is not None
        slot = resident.slot
        del self._running[slot]
        self._pool.evict(slot)
        resident.preemptions += 1
        self.preemptions += 1
        self._begin_again(resident, now_s)

    def _begin_again(self, resident: Resident, now_s: float | None) -> None:
        resident.redo_below = max(resident.redo_below, resident.computed)
        resident.recomputed += resident.computed
        resident.slot, resident.computed = None, 0
        resident.queued_s = resident.queued_s if now_s is None else now_s
        self._enqueue(resident)
        self._calm_steps = 0

    def _secure(self, resident: Resident, tokens: int, now_s: float) -> bool:
        """Room for `tokens` in the request's slot: from the pool, from retained slots, from later requests, or not at all.

        A request that finds no room goes back to the queue itself; let in again, it gets all it may need, so it comes here once.
        """
        slot = resident.slot
        assert slot is not None
        if tokens <= self._pool.reserved(slot):
            return True
        wanted = min(resident.request.tokens_needed, tokens + self.settings.growth_tokens)
        if self._pool.grow(slot, wanted) or self._pool.grow(slot, tokens):
            return True
        for victim in self._victims(resident):
            self._preempt(victim, now_s)
            if self._pool.grow(slot, tokens):
                return True
        if slot not in self._pool.pinned:
            self._preempt(resident, now_s)
        return False

    # --- one step -----------------------------------------------------------------------------------------------------------

    def _compose(self, now_s: float) -> tuple[list[SliceCommand], int]:
        """Slices of the next step by key, and how many passes it may run."""
        order = sorted(self._running.values(), key=lambda s: s.key)
        decoding = [s for s in order if s.pending == 1]
        is_calm = len(decoding) == len(order)  # no prompt to compute
        chunk = 0 if is_calm else self._budget.chunk_tokens(order, self._waiting, now_s)
        passes = self._budget.passes(decoding, self._calm_steps) if is_calm else 1
        slices: list[SliceCommand] = []
        for resident in order:
            if resident.slot is None:  # displaced while room was made for an earlier one
                continue
            is_decoding = resident.pending == 1
            count = 1 if is_decoding else min(resident.pending, chunk)
            if count < 1 or not self._secure(resident, resident.computed + count + passes - 1, now_s):
                continue
            chunk -= 0 if is_decoding else count
            slices.append(resident.slice(count))
        self._calm_steps += 1
        return slices, passes

    # --- what a step brought ------------------------------------------------------------------------------------------------

    def _tokens_by_slot(self, command: StepCommand, result: StepResult) -> dict[int, SlotTokens]:
        """Raises: ValueError when the result does not fit the command; the ranks are then not to be believed."""
        tokens_of = {item.slot: item for item in result.tokens}
        counts = {len(item.tokens) for item in result.tokens}
        expected = command.sampled_slots
        if set(tokens_of) != set(expected) or len(counts) > 1 or not counts <= set(range(1, command.decode_steps + 1)):
            raise ValueError(
                f"step {command.step}: tokens for slots {sorted(tokens_of)}, counts {sorted(counts)}; "
                f"expected slots {sorted(expected)} with equally many, 1 to {command.decode_steps}"
            )
        return tokens_of

    def _learn_pace(self, command: StepCommand, result: StepResult) -> None:
        if not command.slices:
            return
        rows = sum(1 for part in command.slices if len(part.tokens) == 1)
        prefill = sum(len(part.tokens) for part in command.slices if len(part.tokens) > 1)
        self.pace.observe(rows, prefill, (result.ended_s - result.began_s) / result.passes)

    def _take_tokens(self, resident: Resident, got: SlotTokens, now_s: float) -> None:
        """Append tokens up to the end of the answer; a run may have gone on beyond it."""
        before = len(resident.ids)
        for place, token in enumerate(got.tokens):
            if token == BROKEN_TOKEN:
                self._end(resident, "error", now_s, detail="the model's output is not finite for this request")
                return
            logprobs = got.logprobs[place] if got.logprobs else None
            if self._take_token(resident, token, logprobs, before + len(got.tokens) - 1, now_s):
                return
        resident.computed = len(resident.ids) - 1

    def _take_token(self, resident: Resident, token: int, logprobs: TokenLogprobs | None, computed: int, now_s: float) -> bool:
        """One token into an event; True when it was the last. computed: KV that the ranks hold by now."""
        shown, reason, stop = resident.take(token, now_s)
        index, report = resident.output_tokens - 1, None
        if reason is not None:
            resident.computed = min(computed, len(resident.ids))
            report = resident.report(now_s)
            self.lengths.observe(resident.request.class_index, resident.output_tokens)
            self._forget(resident, retain=True)
        self._events.append(TokenEvent(resident.request_id, index, token, shown, logprobs, reason, stop, report=report))
        return reason is not None

    def _end(self, resident: Resident, reason: str, now_s: float, detail: str = "") -> None:
        """End a request otherwise than by a token."""
        report = resident.report(now_s)
        self._forget(resident, retain=False)
        shown = "" if reason == "moved" else resident.text.finish()  # elsewhere it is held back as here
        event = TokenEvent(resident.request_id, resident.output_tokens, None, shown, finish_reason=reason, detail=detail, report=report)
        self._events.append(event)

    def _forget(self, resident: Resident, *, retain: bool) -> None:
        """The request is over: out of every list, its slot kept for reuse or freed."""
        del self._residents[resident.request_id]
        self._finished += 1
        self._calm_steps = 0
        slot = resident.slot
        if slot is None:
            self._waiting.remove(resident)
            return
        del self._running[slot]
        if retain and self.settings.retains_prefixes and resident.computed >= self.settings.block_tokens:
            self._pool.retain(slot, resident.ids, resident.computed)
        else:
            self._pool.evict(slot)
        resident.slot = None
