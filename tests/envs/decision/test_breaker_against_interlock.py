"""Our breaker and interlock-cb's, a library's, through the same random strings of events, as far as both know what happens.

Common to both: a sliding window of seconds, shares of faults and of slow calls from a least number of calls on, an open time that
grows while probes fail, probes with a bound, a probe's slot given back when it is cancelled, calls from before the opening left out of
account. Set so that the rest is out of the way: no rule on faults running, no jitter, no memory of earlier openings, leases
that do not lapse, every probe of a round must be good (interlock judges a round when all its probes are back, ours at the first bad one:
so the probes of a round are answered together). Not in interlock: back-pressure, neutral outcomes, leases that expire, panic.
"""

from __future__ import annotations

import random

import pytest

from envs.decision.circuit_breaker import BreakerSettings, CircuitBreaker, Outcome, ProbeLease, State

interlock = pytest.importorskip("interlock", reason="pip install interlock-cb")

STRINGS, EVENTS = 1500, 40
EXPECTED_S, SLOW_MULTIPLE = 1.0, 4.0
TOOK_S = {"ok": 0.5, "slow": 6.0, "fault": 0.5, "cancelled": 0.5}
FAR_S = 1e9


class Clock:
    def __init__(self) -> None:
        self.now_s = 64.0

    def __call__(self) -> float:
        return self.now_s

    monotonic = __call__  # interlock's name for it


class Cancelled(BaseException):
    """To interlock, what is no Exception says nothing about the other side."""


class Both:
    """The two breakers on one clock. A call is (our lease or None, when it began, whether it was let in by interlock)."""

    def __init__(self, rng: random.Random) -> None:
        self.clock = Clock()
        self.probes = rng.choice((1, 1, 2, 3))
        window_s, calls_min, opens_s = rng.choice((2, 6, 10)), rng.choice((1, 3, 5, 20)), rng.choice((0.5, 2.0, 7.0))
        share = rng.choice([share for share in (0.125, 0.25, 0.5, 1.0) if share * self.probes <= 1.0])
        slow_share = rng.choice([share for share in (0.25, 0.5, 1.0) if share * self.probes <= 1.0])
        growth, longest_s = rng.choice((1.0, 2.0, 3.0)), opens_s * rng.choice((1.0, 5.0, 100.0))
        self.ours = CircuitBreaker(
            now_s=self.clock,
            settings=BreakerSettings(
                failures_to_open=0, failure_fraction=share, slow_fraction=slow_share, slow_multiple=SLOW_MULTIPLE, calls_min=calls_min,
                window_s=window_s, buckets=window_s, open_for_s=opens_s, open_growth=growth, open_max_s=longest_s, forget_after_s=-1.0,
                probes_max=self.probes, probes_to_close=self.probes, lease_s=FAR_S,
            ),
        )  # fmt: skip
        self.theirs = interlock.CircuitBreaker(
            name="theirs",
            clock=self.clock,
            config=interlock.Config(
                failure_rate_threshold=share, slow_call_rate_threshold=slow_share, minimum_number_of_calls=calls_min,
                slow_call_duration_threshold=SLOW_MULTIPLE * EXPECTED_S, window_type=interlock.WindowType.TIME_BASED,
                window_size=window_s, wait_duration_in_open=opens_s, wait_duration_backoff_multiplier=growth,
                wait_duration_in_open_max=longest_s, permitted_calls_in_half_open=self.probes, max_concurrent_probes=self.probes,
            ),
        )  # fmt: skip

    def let_in(self) -> tuple[bool, ProbeLease | None]:
        """Ask both whether a call may go; they must agree, and about when to come back."""
        wait_s = self.ours.next_probe_s
        is_probe = self.ours.state is not State.CLOSED
        lease = self.ours.try_probe() if is_probe else None
        ours = lease is not None if is_probe else self.ours.allows()
        try:
            self.theirs.__enter__()
            theirs = True
        except interlock.CircuitOpenError as refused:
            theirs = False
            if refused.retry_after is not None:
                assert wait_s == pytest.approx(refused.retry_after, abs=1e-9)
        assert ours == theirs
        return ours, lease

    def ended(self, how: str, took_s: float, lease: ProbeLease | None, began_s: float) -> None:
        """The call that was let in last and has not ended yet is over."""
        error: BaseException | None = {"fault": ValueError(), "cancelled": Cancelled()}.get(how)
        self.theirs.__exit__(None if error is None else type(error), error, None)
        outcome = {"fault": Outcome.FAULT, "cancelled": Outcome.NEUTRAL}.get(how, Outcome.OK)
        self.ours.record(outcome, began_s=began_s, took_s=took_s, expected_s=EXPECTED_S, lease=lease)

    def call(self, how: str) -> None:
        """One call, let in and over before the next event, if it is let in."""
        began_s, (goes, lease) = self.clock.now_s, self.let_in()
        if goes:
            self.clock.now_s += TOOK_S[how]
            self.ended(how, TOOK_S[how], lease, began_s)

    def straddling(self, how: str, between: list[str]) -> None:
        """A call that others overtake: where they open the breaker, its own end says nothing any more. It is never a probe (a round
        has no gaps), and none is left over when the breaker closes (ours counts it then, interlock does not). None of the others is slow,
        lest it become slow itself: a fault that is slow too is both to interlock, and to ours a fault."""
        if self.ours.state is not State.CLOSED:
            return
        closings, began_s, (goes, lease) = self.ours.openings, self.clock.now_s, self.let_in()
        assert goes
        for other in between:
            if self.ours.state is State.CLOSED:
                self.call(other)
        assert self.ours.openings - closings <= 1
        self.ended(how, self.clock.now_s - began_s, lease, began_s)

    def round(self, endings: list[str]) -> None:
        """All probes that a half-open breaker lets in, sent together and answered together: one of them slow, all slow."""
        began_s, leases = self.clock.now_s, []
        for _ in range(self.probes):
            goes, lease = self.let_in()
            if goes:
                leases.append(lease)
        if self.ours.state is not State.CLOSED and leases:
            assert not self.let_in()[0]  # no slot is free
        took_s = TOOK_S["slow" if "slow" in endings else "ok"]
        self.clock.now_s += took_s
        for how, lease in zip(endings, leases, strict=False):
            self.ended(how, took_s, lease, began_s)

    def same(self) -> None:
        ours, theirs = self.ours.state, self.theirs.state
        if theirs is interlock.State.OPEN:  # it turns half open when somebody asks
            assert ours in (State.OPEN, State.HALF_OPEN)
        else:
            assert ours.name == theirs.name


def string_of_events(number: int) -> Both:
    rng = random.Random(number)
    both = Both(rng)
    bad = rng.choice((0.1, 0.3, 0.6))

    def ending() -> str:
        return rng.choice(("fault", "slow")) if rng.random() < bad else rng.choice(("ok", "ok", "ok", "cancelled"))

    for _ in range(EVENTS):
        drawn = rng.random()
        if both.ours.state is not State.CLOSED:
            if drawn < 0.5:
                both.clock.now_s += rng.randint(1, 40) / 4  # exact in binary: both see the same comparisons
            elif both.probes == 1:
                both.call(ending())
            else:
                both.round([rng.choice(("ok", "ok", "ok", "slow", "fault")) for _ in range(both.probes)])
        elif drawn < 0.15:
            both.clock.now_s += rng.randint(1, 40) / 4
        elif drawn < 0.25:
            both.straddling(ending(), [rng.choice(("ok", "fault", "cancelled")) for _ in range(rng.randint(1, 6))])
        else:
            both.call(ending())
        both.same()
    return both


def test_the_same_states_as_interlock_in_random_strings_of_events():
    """1,500 strings of 40 events over random settings: the same state after each, the same calls let in, the same time to come back."""
    opened = closed_again = grew = 0
    for number in range(STRINGS):
        try:
            both = string_of_events(number)
        except AssertionError as error:
            raise AssertionError(f"string {number}") from error
        opened += both.ours.openings > 0
        closed_again += both.ours.openings > 0 and both.ours.state is State.CLOSED
        grew += both.ours.openings > 2
    assert opened > STRINGS // 3 and closed_again > STRINGS // 20 and grew > STRINGS // 10
