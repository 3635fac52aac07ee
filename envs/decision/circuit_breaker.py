"""Circuit breakers: when a group, or a class of requests, is left alone for a while because what came back was bad.

Knows outcomes, windows, probes and the fleet's panic rule; leaves to others who sends requests and what a process's death
looks like. The clock is injected (seconds, monotonic), so simulation and service run the same code. An outcome is recorded
when a request's stream ends, not when its answer begins: a stream cut half-way is a fault.

Three outcomes: OK; FAULT (connection lost, 5xx, cut or stalled stream, deadline passed); NEUTRAL (the caller's own mistake,
a cancelled request), which moves nothing (K24). Back-pressure (429, 503 with Retry-After) is honoured by a pause and is
neutral until it has repeated `backpressure_to_fault` times without an OK between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import inf, isfinite

import numpy as np

from envs.decision.call_outcomes import CallWindow, Outcome, classify, is_backpressure
from envs.domain.snapshot import BoolArray, FloatArray, IntArray

__all__ = [
    "Admission", "BreakerPanel", "BreakerSettings", "CircuitBreaker", "ClassBreaker", "Outcome", "ProbeLease", "State",
    "classify", "is_backpressure",
]  # fmt: skip

Clock = Callable[[], float]
_NOBODY = np.zeros(0, np.int64)


class State(IntEnum):
    CLOSED = 0  # traffic passes
    OPEN = 1  # ejected for a time, on statistics
    HALF_OPEN = 2  # probes pass
    FORCED_OPEN = 3  # the process is gone; only `revive` ends this


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, for how long, and what closes it.

    failures_to_open: consecutive faults; 0 switches this rule off. failure_fraction, slow_fraction: share of the last
    `window_s`, judged from `calls_min` outcomes on; a slow call took over `slow_multiple` x what was expected.
    open_for_s grows by `open_growth` each time the breaker opens again within `forget_after_s` of closing, to `open_max_s`,
    and is spread by +-`jitter_fraction` (past open_max_s too), so that the breakers of many routers do not probe in step.
    pause_min_s: shortest pause for a "busy" answer, so that the answers to requests sent together count as one.
    """

    failures_to_open: int = 5
    failure_fraction: float = 0.5
    slow_fraction: float = 0.8
    slow_multiple: float = 5.0
    calls_min: int = 20
    window_s: float = 10.0
    buckets: int = 10
    open_for_s: float = 1.0
    open_growth: float = 2.0
    open_max_s: float = 30.0
    forget_after_s: float = 60.0
    jitter_fraction: float = 0.2
    probes_max: int = 2
    probes_to_close: int = 2
    lease_s: float = 10.0
    backpressure_to_fault: int = 10
    pause_min_s: float = 0.1
    pause_max_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("calls_min", "buckets", "probes_max", "probes_to_close", "backpressure_to_fault"):
            if getattr(self, name) < 1:
                raise ValueError(f"BreakerSettings: {name}={getattr(self, name)} must be at least 1")
        for name in ("window_s", "open_for_s", "lease_s", "slow_multiple", "failure_fraction", "slow_fraction"):
            most = 1.0 if name.endswith("_fraction") else inf
            if not 0 < getattr(self, name) <= most or getattr(self, name) == inf:
                raise ValueError(f"BreakerSettings: {name}={getattr(self, name)} must be finite and in (0, {most}]")
        is_growing = self.open_growth >= 1 and self.open_max_s >= self.open_for_s
        if self.failures_to_open < 0 or not is_growing or not 0 <= self.jitter_fraction < 1:
            raise ValueError(
                f"BreakerSettings: need failures_to_open >= 0, open_growth >= 1, jitter_fraction in [0, 1) and open_max_s >= "
                f"open_for_s; got {self.failures_to_open}, {self.open_growth}, {self.jitter_fraction}, {self.open_max_s}"
            )


@dataclass(frozen=True, slots=True)
class ProbeLease:
    """The right to send one probe. It lapses at `expires_s`, so a probe that never reports back blocks nothing."""

    number: int
    episode: int
    expires_s: float


class CircuitBreaker:
    """One breaker. `now_s` gives monotonic seconds; `rng` spreads open times (none without it); see BreakerSettings.

    is_shadow: judge and report, but let all traffic pass; a dead process is out even so. on_change is called after every
    change that `allowed_from_s` or `state` shows (the panel keeps its arrays by it).
    """

    def __init__(
        self,
        *,
        now_s: Clock,
        settings: BreakerSettings | None = None,
        failures_to_open: int | None = None,
        open_for_s: float | None = None,
        rng: np.random.Generator | None = None,
        is_shadow: bool = False,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        chosen = settings or BreakerSettings()
        if failures_to_open is not None:
            chosen = replace(chosen, failures_to_open=failures_to_open)
        if open_for_s is not None:
            chosen = replace(chosen, open_for_s=open_for_s, open_max_s=max(open_for_s, chosen.open_max_s))
        self.settings = chosen
        self.is_shadow = is_shadow
        self.reason = ""
        self.openings = 0
        self.opened_s = -inf
        self.open_until_s = -inf
        self.pause_until_s = -inf
        self._now_s = now_s
        self._rng = rng
        self._on_change = on_change
        self._window = CallWindow(chosen.window_s, chosen.buckets)
        self._raw = State.CLOSED
        self._consecutive_faults = 0
        self._backpressure_repeats = 0
        self._next_open_s = chosen.open_for_s
        self._closed_s = -inf
        self._leases: dict[int, float] = {}  # lease number -> expiry; never more than probes_max
        self._lease_number = 0
        self._probe_successes = 0

    @property
    def state(self) -> State:
        """The state now: an opening whose time is over is HALF_OPEN without anybody having done anything."""
        return self._state_at(self._now_s())

    def _state_at(self, now_s: float) -> State:
        if self._raw is State.OPEN and now_s >= self.open_until_s:
            return State.HALF_OPEN
        return self._raw

    @property
    def allowed_from_s(self) -> float:
        """Earliest clock time at which a request may pass as things stand; -inf when now and always, inf when never."""
        if self._raw is State.FORCED_OPEN:
            return inf
        if self._raw is State.CLOSED or self.is_shadow:
            return self.pause_until_s
        return self._probe_from_s()

    @property
    def next_probe_s(self) -> float | None:
        """Seconds until the next probe may go, 0 when now; None while closed or forced open."""
        if self._raw is not State.OPEN:
            return None
        return max(0.0, self._probe_from_s() - self._now_s())

    def _probe_from_s(self) -> float:
        slot_s = min(self._leases.values()) if len(self._leases) >= self.settings.probes_max else -inf
        return max(self.open_until_s, self.pause_until_s, slot_s)

    def allows(self) -> bool:
        """Whether a request may go now; in HALF_OPEN only with a lease from `try_probe`."""
        return self._now_s() >= self.allowed_from_s

    def try_probe(self) -> ProbeLease | None:
        """A lease for one probe, or None unless HALF_OPEN with a free slot. Give it to `record` with the probe's outcome."""
        now_s = self._now_s()
        if self._state_at(now_s) is not State.HALF_OPEN or now_s < self.pause_until_s:
            return None
        self._drop_lapsed(now_s)
        if len(self._leases) >= self.settings.probes_max:
            return None
        self._lease_number += 1
        lease = ProbeLease(self._lease_number, self.openings, now_s + self.settings.lease_s)
        self._leases[lease.number] = lease.expires_s
        self._changed()
        return lease

    def release(self, lease: ProbeLease) -> None:
        """Give back the slot of a probe that was cancelled or never sent."""
        if self._leases.pop(lease.number, None) is not None:
            self._changed()

    def record_success(self) -> None:
        self.record(Outcome.OK)

    def record_failure(self, reason: str = "fault") -> None:
        self.record(Outcome.FAULT, reason=reason)

    def record(
        self,
        outcome: Outcome,
        *,
        began_s: float | None = None,
        took_s: float = 0.0,
        expected_s: float = inf,
        lease: ProbeLease | None = None,
        reason: str = "fault",
    ) -> None:
        """Note how an attempt ended. O(1).

        began_s: when it was sent, if known: what began before the breaker opened says nothing about recovery, and neither
        does what began at an unknown time without a lease (unless in shadow, where nobody asks for leases).
        took_s, expected_s: observed and predicted seconds, for the slowness rule; a slow probe has failed. lease: a probe's.
        """
        now_s = self._now_s()
        is_probe = False
        if lease is not None:
            is_probe = lease.episode == self.openings and self._leases.get(lease.number, -inf) > now_s
            self.release(lease)
        if outcome is Outcome.NEUTRAL:
            return
        is_slow = outcome is Outcome.OK and took_s > self.settings.slow_multiple * expected_s
        if outcome is Outcome.OK:
            self._backpressure_repeats = 0
        if self._raw is State.CLOSED:
            self._judge(now_s, outcome, is_slow, reason)
        elif self._raw is not State.FORCED_OPEN:
            is_good = outcome is Outcome.OK and not is_slow
            is_recent = self.is_shadow if began_s is None else began_s >= self.opened_s
            if is_probe and not is_good:
                self._open(now_s, "probe: slow" if is_slow else f"probe: {reason}")
            elif is_probe or is_recent:
                self._count_recovery(now_s, is_good)

    def record_backpressure(self, retry_after_s: float, lease: ProbeLease | None = None) -> Outcome:
        """Honour a "busy": no traffic for `retry_after_s` (within the pause limits). Returns what it was counted as.

        Answers that arrive during the pause belong to the same busy spell and are no repetition.
        """
        if not (isfinite(retry_after_s) and retry_after_s >= 0):
            raise ValueError(f"record_backpressure: retry_after_s={retry_after_s} must be finite and >= 0")
        now_s = self._now_s()
        is_same_spell = now_s < self.pause_until_s
        pause_until_s = now_s + min(max(retry_after_s, self.settings.pause_min_s), self.settings.pause_max_s)
        counted = Outcome.NEUTRAL
        if not is_same_spell:
            self._backpressure_repeats += 1
            if self._backpressure_repeats >= self.settings.backpressure_to_fault:
                counted = Outcome.FAULT
        self.record(counted, lease=lease, reason=f"back-pressure {self._backpressure_repeats} times running")
        if pause_until_s > self.pause_until_s:
            self.pause_until_s = pause_until_s
            self._changed()
        return counted

    def force_open(self, reason: str) -> None:
        """The process is gone: out until `revive`, whatever the panic rule says."""
        self._raw = State.FORCED_OPEN
        self.reason = reason
        self.openings += 1
        self._leases.clear()
        self._changed()

    def revive(self) -> None:
        """The process is back (K13: without history): probes may go at once. Nothing happens unless forced open."""
        if self._raw is not State.FORCED_OPEN:
            return
        self._raw = State.OPEN
        self.openings += 1
        self.opened_s = self.open_until_s = self._now_s()
        self.pause_until_s = -inf
        self.reason = "revived, probing"
        self._start_counting()
        self._changed()

    def _judge(self, now_s: float, outcome: Outcome, is_slow: bool, reason: str) -> None:
        """Count a call of a closed breaker and open it when a rule says so."""
        settings, window = self.settings, self._window
        is_fault = outcome is Outcome.FAULT
        self._consecutive_faults = self._consecutive_faults + 1 if is_fault else 0
        window.add(now_s, is_fault, is_slow)
        if settings.failures_to_open and self._consecutive_faults >= settings.failures_to_open:
            self._open(now_s, f"{self._consecutive_faults} faults running, last: {reason}")
        elif window.calls >= settings.calls_min:
            if window.faults >= settings.failure_fraction * window.calls:
                self._open(now_s, f"{window.faults} of {window.calls} calls failed in {settings.window_s:g} s")
            elif window.slow >= settings.slow_fraction * window.calls:
                self._open(now_s, f"{window.slow} of {window.calls} calls slow in {settings.window_s:g} s")

    def _count_recovery(self, now_s: float, is_good: bool) -> None:
        """Evidence since the opening, from probes or from traffic that panic let through; a fault starts the count again.

        Only a probe's fault lengthens the open time: traffic let through in panic must not, or a busy fleet never recovers.
        """
        self._probe_successes = self._probe_successes + 1 if is_good else 0
        if self._probe_successes >= self.settings.probes_to_close:
            self._raw = State.CLOSED
            self._closed_s = now_s
            self.reason = ""
            self._start_counting()
            self._changed()

    def _open(self, now_s: float, reason: str) -> None:
        if self._raw is State.CLOSED and now_s - self._closed_s > self.settings.forget_after_s:
            self._next_open_s = self.settings.open_for_s
        open_s = self._next_open_s
        self._next_open_s = min(open_s * self.settings.open_growth, self.settings.open_max_s)
        if self._rng is not None:
            spread = self.settings.jitter_fraction
            open_s *= float(self._rng.uniform(1.0 - spread, 1.0 + spread))
        self._raw = State.OPEN
        self.openings += 1
        self.opened_s = now_s
        self.open_until_s = now_s + open_s
        self.reason = reason
        self._start_counting()
        self._changed()

    def _start_counting(self) -> None:
        self._leases.clear()
        self._probe_successes = self._consecutive_faults = self._backpressure_repeats = 0
        self._window.clear()

    def _drop_lapsed(self, now_s: float) -> None:
        for number in [number for number, expires_s in self._leases.items() if expires_s <= now_s]:
            del self._leases[number]

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()


class BreakerPanel:
    """The breakers of a fleet, one per group, with arrays kept up to date by their changes.

    Panic rule: ejection on statistics never takes more than half of the weight of the groups whose process lives; beyond
    that the latest openings are let through. A dead process is always out, and a pause that a group asked for is honoured.
    weights: capacity of each group in any unit, equal by default. Every breaker has a random stream of its own.
    """

    def __init__(
        self,
        groups: int,
        *,
        now_s: Clock,
        settings: BreakerSettings | None = None,
        weights: Sequence[float] | FloatArray | None = None,
        rng: np.random.Generator | None = None,
        is_shadow: bool = False,
    ) -> None:
        self._now_s = now_s
        self._weights = np.ones(groups)
        if weights is not None:
            self.set_weights(weights)
        streams = rng.spawn(groups) if rng is not None else [None] * groups
        self._allowed_from_s = np.full(groups, -inf)
        self._pause_until_s = np.full(groups, -inf)
        self._open_until_s = np.full(groups, -inf)
        self._opened_s = np.full(groups, -inf)
        self._raw = np.zeros(groups, dtype=np.int64)
        self._any_open = False
        self._allowed = np.ones(groups, dtype=np.bool_)
        self._stale_from_s = -inf  # the cached answer holds until this clock time or the next change
        self.panic_readmitted = 0
        self.breakers = tuple(
            CircuitBreaker(now_s=now_s, settings=settings, rng=stream, is_shadow=is_shadow, on_change=self._refresher(index))
            for index, stream in enumerate(streams)
        )

    def _refresher(self, index: int) -> Callable[[], None]:
        def refresh() -> None:
            breaker = self.breakers[index]
            self._allowed_from_s[index] = breaker.allowed_from_s
            self._pause_until_s[index] = breaker.pause_until_s
            self._open_until_s[index] = breaker.open_until_s
            self._opened_s[index] = breaker.opened_s
            self._raw[index] = int(breaker._raw)
            self._any_open = bool((self._raw == int(State.OPEN)).any())
            self._stale_from_s = -inf

        return refresh

    def set_weights(self, weights: Sequence[float] | FloatArray) -> None:
        """Replace the capacities, e.g. after a regroup; shape (groups,)."""
        new = np.asarray(weights, dtype=np.float64)
        if new.shape != self._weights.shape or not (np.isfinite(new).all() and (new >= 0).all()):
            raise ValueError(f"BreakerPanel: weights {new} must be {self._weights.size} finite numbers >= 0, one per group")
        self._weights = new
        self._stale_from_s = -inf

    def states(self) -> IntArray:
        """State of every group now, shape (groups,), values of `State`; a fresh array."""
        if not self._any_open:
            return self._raw.copy()
        is_half_open = (self._raw == int(State.OPEN)) & (self._now_s() >= self._open_until_s)
        return np.where(is_half_open, int(State.HALF_OPEN), self._raw)

    def allows(self, group_index: IntArray | None = None) -> BoolArray:
        """Which groups may get a request now, shape (groups,) or that of `group_index`; a fresh array.

        Between changes the answer is a cached one: no breaker is asked, whatever the number of groups.
        """
        now_s = self._now_s()
        if now_s >= self._stale_from_s:
            self._judge(now_s)
        return self._allowed.copy() if group_index is None else self._allowed[group_index]

    def _judge(self, now_s: float) -> None:
        passes = now_s >= self._allowed_from_s
        self.panic_readmitted = 0
        ejected = np.flatnonzero(self._raw == int(State.OPEN))
        if ejected.size:
            living = self._raw != int(State.FORCED_OPEN)
            room = 0.5 * float(self._weights[living].sum())
            # The earliest openings stay out: a group already ejected does not flicker when another one fails.
            order = ejected[np.argsort(self._opened_s[ejected], kind="stable")]
            readmitted = []
            for index, weight in zip(order.tolist(), self._weights[order].tolist(), strict=True):  # plain floats: 3 x faster
                if weight <= room:
                    room -= weight
                else:
                    readmitted.append(index)
            chosen = np.array(readmitted, dtype=np.int64)
            chosen = chosen[~passes[chosen] & (now_s >= self._pause_until_s[chosen])]
            passes[chosen] = True
            self.panic_readmitted = int(chosen.size)
        self._allowed = passes
        later = np.concatenate([self._allowed_from_s, self._pause_until_s])
        later = later[later > now_s]
        self._stale_from_s = float(later.min()) if later.size else inf

    def admits(self) -> BoolArray:
        """`allows`, and the groups that wait for a probe: a half-open one closes only through traffic that probes it; a fresh array."""
        admitted = self.allows()
        if (due := self.due_probes()).size:
            admitted[due] = True
        return admitted

    def due_probes(self) -> IntArray:
        """Groups that wait for a probe: half open, with a free slot and no pause. Send one there, or they never close."""
        if not self._any_open:
            return _NOBODY
        return np.flatnonzero((self._raw == int(State.OPEN)) & (self._now_s() >= self._allowed_from_s))

    def next_change_s(self) -> float:
        """Clock time at which `allows` may change without a new outcome; inf when none will. For retry-after and timers."""
        self.allows()
        return self._stale_from_s


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a request of a class goes on; `retry_after_s` where it does not, `lease` where it goes as a probe."""

    is_allowed: bool
    retry_after_s: float = 0.0
    lease: ProbeLease | None = None


_ADMITTED = Admission(True)

CLASS_SETTINGS = BreakerSettings(
    failures_to_open=0, window_s=30.0, open_for_s=2.0, open_max_s=20.0, calls_min=20, probes_max=4, probes_to_close=4, lease_s=30.0
)
"""Per class: no rule on consecutive time-outs (a burst times out together), only their share over the window, which is long
because a time-out is known only once it has happened."""


class ClassBreaker:
    """Sheds one class of requests when its share of time-outs passes its limit, while the others go on (DESIGN section 4).

    timeout_fraction: the limit per class, shape (classes,). open -> shedding with Retry-After -> probing.
    """

    RETRY_AFTER_MIN_S = 0.1  # all probe slots taken: come back soon

    def __init__(
        self,
        timeout_fraction: Sequence[float],
        *,
        now_s: Clock,
        settings: BreakerSettings = CLASS_SETTINGS,
        rng: np.random.Generator | None = None,
    ) -> None:
        streams = rng.spawn(len(timeout_fraction)) if rng is not None else [None] * len(timeout_fraction)
        self.breakers = tuple(
            CircuitBreaker(now_s=now_s, settings=replace(settings, failure_fraction=limit), rng=stream)
            for limit, stream in zip(timeout_fraction, streams, strict=True)
        )

    def admit(self, class_index: int) -> Admission:
        """Ask before a request is queued; pass `lease` on to `record` when it leaves the system."""
        breaker = self.breakers[class_index]
        state = breaker.state
        if state is State.CLOSED:
            return _ADMITTED
        lease = breaker.try_probe()
        if lease is not None:
            return Admission(True, lease=lease)
        wait_s = breaker.next_probe_s
        return Admission(False, max(self.RETRY_AFTER_MIN_S, wait_s if wait_s is not None else breaker.settings.open_max_s))

    def record(self, class_index: int, is_timeout: bool, *, began_s: float | None = None, lease: ProbeLease | None = None) -> None:
        """A request of the class left the system, late beyond its deadline or not."""
        outcome = Outcome.FAULT if is_timeout else Outcome.OK
        self.breakers[class_index].record(outcome, began_s=began_s, lease=lease, reason="timed out")

    def states(self) -> IntArray:
        """State of every class now, shape (classes,), values of `State`."""
        return np.array([int(breaker.state) for breaker in self.breakers], dtype=np.int64)
