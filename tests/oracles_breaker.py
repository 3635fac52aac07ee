"""A breaker in the plainest form: it keeps every call since the last change of state and counts by looking through them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PlainBreaker:
    """Reference for `envs.decision.circuit_breaker.CircuitBreaker` without jitter. All times are handed in."""

    failures_to_open: int
    failure_fraction: float
    slow_fraction: float
    calls_min: int
    window_buckets: int  # buckets of one second
    open_for_s: float
    open_growth: float
    open_max_s: float
    forget_after_s: float
    probes_max: int
    probes_to_close: int
    lease_s: float
    backpressure_to_fault: int
    pause_min_s: float
    pause_max_s: float
    calls: list[tuple[float, str]] = field(default_factory=list)  # (when, "ok" | "slow" | "fault") while closed
    evidence: list[str] = field(default_factory=list)  # "good" | "bad" since the opening
    busy: list[str] = field(default_factory=list)  # "busy" | "ok" spells, to count those running at the end
    open_times_s: list[float] = field(default_factory=list)  # lengths of the openings that still count for growth
    opened_s: float | None = None
    open_s: float = 0.0
    closed_s: float = float("-inf")
    dead: bool = False
    pause_until_s: float = float("-inf")
    leases: dict[int, float] = field(default_factory=dict)

    def state(self, now_s):
        if self.dead:
            return "FORCED_OPEN"
        if self.opened_s is None:
            return "CLOSED"
        return "OPEN" if now_s < self.opened_s + self.open_s else "HALF_OPEN"

    def allows(self, now_s):
        if self.dead or now_s < self.pause_until_s:
            return False
        live = [expiry for expiry in self.leases.values() if expiry > now_s]
        return self.state(now_s) == "CLOSED" or (self.state(now_s) == "HALF_OPEN" and len(live) < self.probes_max)

    def can_probe(self, now_s):
        return self.state(now_s) == "HALF_OPEN" and self.allows(now_s)

    def _running(self, entries, wanted):
        count = 0
        for entry in reversed(entries):
            if entry != wanted:
                break
            count += 1
        return count

    def _open(self, now_s):
        if self.opened_s is None and now_s - self.closed_s > self.forget_after_s:
            self.open_times_s = []
        length_s = min(self.open_for_s * self.open_growth ** len(self.open_times_s), self.open_max_s)
        self.open_times_s.append(length_s)
        self.opened_s, self.open_s = now_s, length_s
        self.calls, self.evidence, self.busy, self.leases = [], [], [], {}

    def _close(self, now_s):
        self.opened_s, self.closed_s = None, now_s
        self.calls, self.evidence, self.busy, self.leases = [], [], [], {}

    def call(self, now_s, what, is_probe=False, is_recent=False):
        """`what` is "ok", "slow" or "fault"."""
        if what != "fault":
            self.busy.append("ok")
        state = self.state(now_s)
        if state == "CLOSED":
            self.calls.append((now_s, what))
            recent = [kind for when_s, kind in self.calls if int(now_s) - int(when_s) < self.window_buckets]
            all_kinds = [kind for _, kind in self.calls]
            running = self._running(all_kinds, "fault")
            share_counts = len(recent) >= self.calls_min
            if (
                running >= self.failures_to_open
                or (share_counts and recent.count("fault") >= self.failure_fraction * len(recent))
                or (share_counts and recent.count("slow") >= self.slow_fraction * len(recent))
            ):
                self._open(now_s)
        elif state in ("OPEN", "HALF_OPEN"):
            if is_probe and what != "ok":
                self._open(now_s)
            elif is_probe or is_recent:
                self.evidence.append("good" if what == "ok" else "bad")
                if self._running(self.evidence, "good") >= self.probes_to_close:
                    self._close(now_s)

    def backpressure(self, now_s, retry_after_s):
        until_s = now_s + min(max(retry_after_s, self.pause_min_s), self.pause_max_s)
        if now_s >= self.pause_until_s:
            self.busy.append("busy")
            if self._running(self.busy, "busy") >= self.backpressure_to_fault:
                self.call(now_s, "fault")
        self.pause_until_s = max(self.pause_until_s, until_s)

    def die(self):
        self.dead, self.leases = True, {}

    def revive(self, now_s):
        if self.dead:
            self.dead = False
            self.opened_s, self.open_s, self.pause_until_s = now_s, 0.0, float("-inf")
            self.calls, self.evidence, self.busy, self.leases = [], [], [], {}
