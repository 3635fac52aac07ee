"""How an attempt ended, in three outcomes, and counts of them over a sliding window; leaves judging to `circuit_breaker`."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    OK = 0
    FAULT = 1
    NEUTRAL = 2


def is_backpressure(status: int, has_retry_after: bool) -> bool:
    """Whether an HTTP answer says "busy" rather than "broken": 429, or 503 with Retry-After."""
    return status == 429 or (status == 503 and has_retry_after)


def classify(status: int | None, has_retry_after: bool = False, is_cancelled: bool = False) -> Outcome:
    """Outcome of an attempt by its final HTTP status; None where no answer or no proper end of the stream came.

    4xx are the caller's (K24), except 408, with which a server says that it timed out; back-pressure is NEUTRAL here:
    report it by `CircuitBreaker.record_backpressure`, which counts its repetitions.
    """
    if is_cancelled or (status is not None and is_backpressure(status, has_retry_after)):
        return Outcome.NEUTRAL
    if status is None or status == 408 or status >= 500:
        return Outcome.FAULT
    return Outcome.NEUTRAL if status >= 400 else Outcome.OK


class CallWindow:
    """Counts of calls, faults and slow calls over the last `buckets` buckets of time; O(1) per call whatever the traffic."""

    __slots__ = ("_bucket_s", "_calls", "_faults", "_newest", "_slow", "calls", "faults", "slow")

    def __init__(self, window_s: float, buckets: int) -> None:
        self._bucket_s = window_s / buckets
        self._calls = [0] * buckets
        self._faults = [0] * buckets
        self._slow = [0] * buckets
        self._newest = -1
        self.calls = self.faults = self.slow = 0

    def clear(self) -> None:
        size = len(self._calls)
        self._calls, self._faults, self._slow = [0] * size, [0] * size, [0] * size
        self.calls = self.faults = self.slow = 0

    def roll_to(self, now_s: float) -> int:
        """Forget buckets that are too old; return the slot of `now_s`."""
        size = len(self._calls)
        bucket = int(now_s // self._bucket_s)
        if bucket == self._newest:
            return bucket % size
        if bucket - self._newest >= size:
            self.clear()
            self._newest = bucket
        while self._newest < bucket:
            self._newest += 1
            slot = self._newest % size
            self.calls -= self._calls[slot]
            self.faults -= self._faults[slot]
            self.slow -= self._slow[slot]
            self._calls[slot] = self._faults[slot] = self._slow[slot] = 0
        return bucket % size

    def add(self, now_s: float, is_fault: bool, is_slow: bool) -> None:
        slot = self.roll_to(now_s)
        self._calls[slot] += 1
        self._faults[slot] += is_fault
        self._slow[slot] += is_slow
        self.calls += 1
        self.faults += is_fault
        self.slow += is_slow
