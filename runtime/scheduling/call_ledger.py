"""What became of each call, for those who keep records or compare policies: opened at the door, closed when the call is over.

Does nothing where nobody listens. Knows one entry per call under way; a listener's fault is logged and never reaches a request.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from envs.domain.requests import Request
from runtime.calls import Call
from runtime.request_notes import AttemptNotes

logger = logging.getLogger(__name__)

DONE, LEFT = "done", "left"


@dataclass(slots=True, eq=False)
class CallAccount:
    """One call: how it ended, beside what its own notes say (`Call.notes`). Times on the monotonic clock, NaN where the event never came.

    end: "done", "left" (its caller went), or why it was refused or lost (a `Refusal`'s reason). arm: of a rollout, "" outside one.
    tokens: of the answer so far.
    """

    call: Call
    arrival_s: float
    arm: str = ""
    end: str = LEFT
    first_s: float = math.nan
    last_s: float = math.nan
    tokens: int = 0

    @property
    def attempts(self) -> int:
        return self.call.notes.made

    @property
    def last(self) -> AttemptNotes | None:
        """The last attempt; None where no group was chosen."""
        attempts = self.call.notes.attempts
        return attempts[-1] if attempts else None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first; 0 for a single one."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


class CallLedger:
    """`listeners` are told each account when its call is over. `arm_of`: the rollout's arm of a call that arrived at a time,
    asked once, at the door."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._open: dict[int, CallAccount] = {}
        self.listeners: list[Callable[[CallAccount], None]] = []
        self.arm_of: Callable[[Call, float], str] | None = None

    def arm(self, request_id: int) -> str:
        account = self._open.get(request_id)
        return account.arm if account is not None else ""

    def open(self, call: Call, request: Request) -> None:
        if self.listeners or self.arm_of is not None:
            self._open[request.request_id] = CallAccount(call, request.arrival_s, self._arm(call, request.arrival_s))

    def turned_away(self, call: Call, reason: str) -> None:
        """Refused at the door."""
        if self.listeners:
            now_s = self._now_s()
            self._tell(CallAccount(call, now_s, self._arm(call, now_s), reason))

    def attempt_ended(self, request_id: int, first_s: float, last_s: float, tokens: int, is_whole: bool) -> None:
        account = self._open.get(request_id)
        if account is not None:
            account.tokens = tokens
            if math.isnan(account.first_s):
                account.first_s = first_s
            if not math.isnan(last_s):
                account.last_s = last_s
            if is_whole:
                account.end = DONE

    def refused(self, request_id: int, reason: str) -> None:
        account = self._open.get(request_id)
        if account is not None:
            account.end = reason

    def close(self, request_id: int) -> None:
        account = self._open.pop(request_id, None)
        if account is not None:
            self._tell(account)

    def _arm(self, call: Call, arrival_s: float) -> str:
        return self.arm_of(call, arrival_s) if self.arm_of is not None else ""

    def _tell(self, account: CallAccount) -> None:
        for listener in self.listeners:
            try:
                listener(account)
            except Exception:  # a bug of ours must not lose a request
                logger.exception("listener of calls failed")
