"""One request on its way: its token ids, what of them is computed, where its time went."""

from __future__ import annotations

import math

from envs.domain.requests import LATENCY_PARTS
from runtime.torch_tp.requests import GenerationRequest, RequestReport
from runtime.torch_tp.steps import RankTimings
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

    # --- time ---------------------------------------------------------------------------------------------------------------

    def spend_until(self, now_s: float, part: int) -> None:
        """The time since the last stamp belonged to `part`."""
        self._parts[part] += max(0.0, now_s - self._mark_s)
        self._mark_s = max(now_s, self._mark_s)

    def admitted(self, now_s: float) -> None:
        self.spend_until(now_s, QUEUE)
        if math.isnan(self._admitted_s):
            self._admitted_s = now_s

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

    def got_token(self, now_s: float) -> None:
        self.spend_until(now_s, RETURN)
        if math.isnan(self._first_token_s):
            self._first_token_s = now_s

    def report(self, finish_s: float) -> RequestReport:
        self.spend_until(finish_s, QUEUE if self.slot is None else RETURN)
        return RequestReport(
            self._arrival_s, self._admitted_s, self._first_token_s, finish_s, len(self.request.prompt), self.output_tokens,
            self.hit_tokens, self.preemptions, self.recoveries, self.recomputed, tuple(self._parts),
        )  # fmt: skip
