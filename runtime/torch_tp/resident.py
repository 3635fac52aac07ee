"""One request on its way: its token ids, what of them is computed, where its time went."""

from __future__ import annotations

import math

from envs.domain.requests import LATENCY_PARTS
from runtime.torch_tp.requests import GenerationRequest, RequestReport
from runtime.torch_tp.steps import NewSlot, RankTimings, SliceCommand
from runtime.torch_tp.stop_strings import AnswerText

(QUEUE, PREFILL, DECODE, STALL, COMMUNICATION, HOST, PAUSE, REDONE, RETURN) = range(len(LATENCY_PARTS))


class Resident:
    """State of one request in the batcher, waiting or running.

    ids: prompt and answer so far. computed: how many of them have KV in `slot` (None while waiting). redo_below: ids below it had
    been computed before and were lost. key: place in the queue, smaller is earlier; it never changes, so nobody waits for ever.
    """

    def __init__(
        self, request: GenerationRequest, key: tuple[float, int], text: AnswerText, stop_ids: frozenset[int], now_s: float
    ) -> None:
        self.request = request
        self.key = key
        self.text = text
        self.stop_ids = stop_ids
        self.ids = [*request.prompt, *request.answer]
        text.follow(request.answer)
        self.computed = 0
        self.slot: int | None = None
        self.plan_version = 0
        self.queued_s = now_s
        self.hit_tokens = 0
        self.preemptions = 0
        self.recoveries = 0
        self.redo_below = 0
        self.recomputed = 0
        self._arrival_s = now_s
        self._admitted_s = math.nan
        self._first_token_s = math.nan
        self._parts = [0.0] * len(LATENCY_PARTS)
        self._mark_s = now_s  # the time up to which everything is accounted for

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_urgent(self) -> bool:
        """Whether it is above normal priority."""
        return self.request.priority > 0

    @property
    def claim(self) -> tuple[float, int]:
        """Whom it may displace: its place in the queue without what it waited elsewhere, since a move shall disturb nobody who runs
        here."""
        return self.key[0] + self.request.waited_s, self.key[1]

    @property
    def output_tokens(self) -> int:
        return len(self.ids) - len(self.request.prompt)

    @property
    def tokens_left(self) -> int:
        """Answer tokens it may still get."""
        return self.request.max_tokens - self.output_tokens

    @property
    def pending(self) -> int:
        """Ids without KV: 1 while decoding, more while a prompt (or what was lost) is computed."""
        return len(self.ids) - self.computed

    @property
    def arrival_s(self) -> float:
        return self._arrival_s

    # --- tokens -------------------------------------------------------------------------------------------------------------

    def start(self, slot: int, plan_version: int, held: int, now_s: float) -> None:
        """It runs in `slot` from now on, which holds the KV of its first `held` ids."""
        self.slot, self.plan_version, self.computed = slot, plan_version, held
        self.hit_tokens = max(self.hit_tokens, min(held, len(self.request.prompt)))
        self.spend_until(now_s, QUEUE)
        if math.isnan(self._admitted_s):
            self._admitted_s = now_s

    def begin_again(self, now_s: float | None) -> None:
        """Its KV is gone: it waits, and is computed again from its ids."""
        self.redo_below = max(self.redo_below, self.computed)
        self.recomputed += self.computed
        self.slot, self.computed = None, 0
        self.queued_s = self.queued_s if now_s is None else now_s

    def new_slot(self, tokens_max: int, keeps_tokens: int) -> NewSlot:
        """What the ranks must know of it; see `NewSlot`."""
        request = self.request
        assert self.slot is not None
        counts = request.sampling.counts_tokens
        return NewSlot(
            slot=self.slot,
            request_id=request.request_id,
            plan_version=self.plan_version,
            tokens_max=tokens_max,
            seed=request.seed,
            sampling=request.sampling,
            keeps_tokens=keeps_tokens,
            prompt=request.prompt if counts else (),
            output=tuple(self.ids[len(request.prompt) :]) if counts else (),
            stop_ids=tuple(sorted(self.stop_ids)),
            stop_from=len(request.prompt) + request.min_tokens if request.min_tokens else 0,
            logprobs=request.logprobs,
        )

    def slice(self, count: int) -> SliceCommand:
        """Its next `count` ids without KV, to be computed."""
        assert self.slot is not None
        end = self.computed + count
        tokens = tuple(self.ids[self.computed : end])
        return SliceCommand(self.slot, self.request_id, self.plan_version, tokens, self.computed, wants_sample=end == len(self.ids))

    def take(self, token: int, now_s: float) -> tuple[str, str | None, int | str | None]:
        """The next token of its answer. Returns: text to show; where it is the last one, the reason and what stopped it."""
        self.ids.append(token)
        self.spend_until(now_s, RETURN)
        if math.isnan(self._first_token_s):
            self._first_token_s = now_s
        can_stop = self.output_tokens > self.request.min_tokens
        if token in self.stop_ids and can_stop:
            return self.text.finish(), "stop", token
        shown = self.text.push(token, can_stop)
        is_full = self.tokens_left == 0
        if is_full and self.text.matched is None:
            shown += self.text.finish()
        if self.text.matched is not None:
            return shown, "stop", self.text.matched
        return shown, "length" if is_full else None, None

    # --- time ---------------------------------------------------------------------------------------------------------------

    def spend_until(self, now_s: float, part: int) -> None:
        """The time since the last stamp belonged to `part`."""
        self._parts[part] += max(0.0, now_s - self._mark_s)
        self._mark_s = max(now_s, self._mark_s)

    def spend_step(self, began_s: float, ended_s: float, slowest: RankTimings | None, took_part: bool, is_redone: bool) -> None:
        """A step ran from began_s to ended_s; `slowest` is the rank that the others waited for.

        What the step took here beyond what it took that rank, by each one's own clock, is the message's way there and back: host.
        """
        self.spend_until(began_s, HOST)
        if not took_part:
            self.spend_until(ended_s, QUEUE)
            return
        if is_redone:
            self.spend_until(ended_s, REDONE)
            return
        phase = DECODE if self.output_tokens else PREFILL
        if slowest is None:
            self.spend_until(ended_s, phase)
            return
        self._parts[phase] += slowest.compute_s
        self._parts[STALL] += slowest.memory_stall_s
        self._parts[COMMUNICATION] += slowest.communication_s
        self._parts[HOST] += slowest.host_s + max(0.0, ended_s - began_s - slowest.total_s)
        self._mark_s = ended_s

    def report(self, finish_s: float) -> RequestReport:
        self.spend_until(finish_s, QUEUE if self.slot is None else RETURN)
        return RequestReport(
            self._arrival_s, self._admitted_s, self._first_token_s, finish_s, len(self.request.prompt), self.output_tokens,
            self.hit_tokens, self.preemptions, self.recoveries, self.recomputed, tuple(self._parts),
        )  # fmt: skip
