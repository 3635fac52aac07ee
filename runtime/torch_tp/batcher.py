"""Continuous batching: which requests run, what each step computes, what becomes of its tokens.

Pure: no torch, no processes, no clock of its own. The engine asks for a step, has the ranks carry it out, hands back what came of it.
Everything a request needs to be begun again lies here as token ids, so that nothing is lost with a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from envs.decision.length_estimator import LengthEstimator
from runtime.torch_tp.batch import Batch
from runtime.torch_tp.batcher_settings import BatcherSettings, Load, Progress
from runtime.torch_tp.requests import GenerationRequest, Refused, TokenEvent, TokenLogprobs
from runtime.torch_tp.resident import HOST, PAUSE, Resident
from runtime.torch_tp.step_pace import StepPace
from runtime.torch_tp.steps import BROKEN_TOKEN, SlotTokens, StepCommand, StepResult
from runtime.torch_tp.stop_strings import AnswerText, TokenText

__all__ = ["Batcher", "BatcherSettings", "Load", "Progress"]


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
        self._make_text = make_text
        self._batch = Batch(settings, self.pace, self.lengths, plan_version)
        self._residents: dict[str, Resident] = {}
        self._events: list[TokenEvent] = []
        self._in_flight: StepCommand | None = None
        self._step = 0
        self.lengths.expected_remaining(0, 0)  # compiled now, not under the first request

    # --- callers ------------------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, now_s: float) -> None:
        """Take a request in. Raises: Refused, with the limit that it would break."""
        self._check_acceptable(request, now_s)
        settings = self.settings
        text = AnswerText(self._make_text() if self._make_text else None, request.stop_strings)
        stop_ids = frozenset(request.stop_ids) | (frozenset() if request.ignore_eos else frozenset(settings.eos_ids))
        key = (now_s - request.waited_s - request.priority * settings.head_start_s, self._batch.entered)
        resident = Resident(request, key, text, stop_ids, now_s)
        self._residents[request.request_id] = resident
        self._batch.enter(resident)

    def _check_acceptable(self, request: GenerationRequest, now_s: float) -> None:
        if request.request_id in self._residents:
            raise Refused("duplicate", f"request {request.request_id!r} is still being served; give every request an id of its own")
        self.settings.check(request, has_text=self._make_text is not None)
        if request.deadline_s is not None and request.deadline_s <= now_s:
            raise Refused("deadline_passed", f"the deadline passed {now_s - request.deadline_s:.3f} s ago")
        if len(self._batch.waiting) >= self.settings.queue_limit:
            raise Refused("queue_full", f"{len(self._batch.waiting)} requests are waiting already; try again later")

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

    def progress(self) -> list[Progress]:
        """Of every request inside: those that run, then those that wait, in the queue's order."""
        residents = [*self._batch.running.values(), *self._batch.waiting]
        return [
            Progress(
                resident.request_id,
                resident.output_tokens - len(resident.request.answer),
                0 if resident.pending == 1 and resident.output_tokens else resident.pending,
                resident.slot is not None,
            )
            for resident in residents
        ]

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
        self._batch.admit(now_s)
        slices, decode_steps = self._batch.next_slices(now_s)
        if not self._residents:
            self.check()
        if not (slices or self._batch.pool.has_orders):
            return None
        self._step += 1
        command = StepCommand(self._step, tuple(slices), decode_steps, **self._batch.pool.take_orders())
        self._in_flight = command
        return command

    def _expire(self, now_s: float) -> None:
        for resident in list(self._residents.values()):
            deadline_s = resident.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._end(resident, "deadline", now_s, detail=f"not done {deadline_s - resident.arrival_s:.3f} s after it was submitted")

    def apply(self, result: StepResult, now_s: float) -> list[TokenEvent]:
        """Take in what a step brought; returns the events due, oldest first. A result of any other step than the last is dropped."""
        command = self._in_flight
        if command is None or command.step != result.step:
            return self.drain_events()
        tokens_of = command.tokens_by_slot(result)
        self._in_flight = None
        self.pace.learn(command, result)
        slowest = max(result.timings, key=lambda timings: timings.busy_s, default=None)
        parts = {part.slot: part for part in command.slices}
        for slot, resident in list(self._batch.running.items()):
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
                self._batch.pool.holds(slot, resident.ids, resident.computed)
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
        self._batch.lose(slots, now_s)

    def note_pause(self, began_s: float, ended_s: float) -> None:
        """Nothing ran between these times: a re-split, a recovery. A step in flight came to nothing: its time counts too."""
        for resident in self._batch.running.values():
            resident.spend_until(began_s, HOST if self._in_flight is None else PAUSE)
            resident.spend_until(ended_s, PAUSE)

    # --- plans and pool -----------------------------------------------------------------------------------------------------

    def use_plan(self, version: int) -> None:
        """Requests admitted from now on use this plan; those running keep theirs."""
        self._batch.plan_version = version

    def slots_of_plan(self, version: int) -> tuple[int, ...]:
        """Slots whose KV lies by the head ranges of this plan, running and retained."""
        return self._batch.pool.of_plan(version)

    def live_versions(self) -> tuple[int, ...]:
        """Plan versions in use, ascending."""
        return tuple(sorted({self._batch.plan_version, *self._batch.pool.versions}))

    def moved_kv(self, slots: Iterable[int], version: int) -> None:
        """The ranks moved the KV of these slots to the head ranges of another plan; nothing else about them changed."""
        self._batch.move(slots, version)

    def drop_retained(self) -> None:
        """Give up KV kept for reuse."""
        self._batch.pool.drop_retained()

    # --- KV from and for other engines --------------------------------------------------------------------------------------

    def held(self, request_id: str) -> tuple[int, tuple[int, ...], int] | None:
        """Slot of a running request, the ids whose KV it holds, and how many its slot may come to hold; None where it does not run."""
        resident = self._residents.get(request_id)
        if resident is None or resident.slot is None:
            return None
        return resident.slot, tuple(resident.ids[: resident.computed]), resident.request.tokens_needed

    def expect(self, ids: Sequence[int], tokens: int) -> int | None:
        """See `SlotPool.expect`; under the plan of new requests. What arrives is of use to any request that begins alike."""
        return self._batch.pool.expect(ids, self._batch.plan_version, tokens)

    def is_at_ranks(self, slot: int) -> bool:
        """Whether the ranks know of an expected slot."""
        return self._in_flight is None and not self._batch.pool.is_ordered(slot)

    def is_expected(self, slot: int) -> bool:
        """Whether a slot still waits for what `expect` announced: it may have been lost."""
        return self._batch.pool.is_expected(slot)

    def arrived(self, slot: int, ids: Sequence[int]) -> bool:
        """See `SlotPool.arrived`."""
        return self._batch.pool.arrived(slot, ids)

    # --- views --------------------------------------------------------------------------------------------------------------

    @property
    def prefix_hit_tokens(self) -> int:
        """Tokens whose KV requests found in slots of others, so far."""
        return self._batch.prefix_hit_tokens

    @property
    def preemptions(self) -> int:
        """Running requests that others displaced, so far."""
        return self._batch.preemptions

    @property
    def request_ids(self) -> set[str]:
        """Of all requests being served."""
        return set(self._residents)

    @property
    def is_idle(self) -> bool:
        return not self._residents

    def load(self, now_s: float) -> Load:
        batch = self._batch
        return Load(
            waiting=len(batch.waiting),
            running=len(batch.running),
            decoding=sum(1 for resident in batch.running.values() if resident.pending == 1),
            kv_tokens_running=batch.pool.ledger.tokens_running,
            kv_tokens_retained=batch.pool.ledger.tokens_retained,
            prefill_backlog_tokens=sum(resident.pending for resident in self._residents.values() if resident.pending > 1),
            oldest_wait_s=max((now_s - resident.queued_s for resident in batch.waiting), default=0.0),
        )

    def check(self) -> None:
        """Raise AssertionError unless everything is conserved: slots, KV tokens, requests, answer tokens."""
        self._batch.check()
        known = {resident.request_id for resident in (*self._batch.waiting, *self._batch.running.values())}
        assert known == set(self._residents), "a request neither waits nor runs"

    # --- what a step brought ------------------------------------------------------------------------------------------------

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
        """The request is over."""
        del self._residents[resident.request_id]
        self._batch.leave(resident, retain=retain)
