"""Who meets the candidate and when, and what is compared: with a clock of our own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from runtime.rollout.settings import RolloutEntry
from runtime.rollout.stage_stats import canary_stats
from runtime.rollout.switchback import CANDIDATE, INCUMBENT, LINGER_S, OUTSIDE, Switchback
from runtime.scheduling.call_ledger import DONE, CallAccount
from tests.runtime.scheduling.service_parts import call


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def made(clock: Clock, share: float = 1.0, before: Switchback | None = None, **settings) -> Switchback:
    entry = RolloutEntry(**({"slice_s": 10.0, "washout_s": 2.0, "sticky_s": 60.0} | settings))
    return Switchback(entry, share, "salt", clock(), 0, 1.0, clock, before)


def ended(switchback: Switchback, clock: Clock, asked, took_s: float = 0.5, end: str = DONE, first_s: float = 0.1) -> CallAccount:
    """The call arrives now; its account when it is over, `took_s` later (the clock stays)."""
    account = CallAccount(asked, clock(), switchback.arm_of(asked, clock()), end)
    account.first_s, account.last_s, account.tokens = clock() + first_s, clock() + took_s, 10
    return account


def test_shares_are_nested_and_of_their_size():
    """Of 20,000 users 1, 10 and 50 % are in, within 4 standard errors; who is in at 1 % is in at 10 and at 50 %."""
    clock = Clock()
    inside = {
        share: {i for i in range(20_000) if made_for.arm_of(call(user=f"u{i}"), clock()) != OUTSIDE}
        for share in (0.01, 0.1, 0.5)
        for made_for in [made(clock, share)]
    }
    for share, users in inside.items():
        assert abs(len(users) - 20_000 * share) < 4 * math.sqrt(20_000 * share * (1 - share))
    assert inside[0.01] < inside[0.1] < inside[0.5]


def test_slices_alternate_within_pairs_whose_order_varies():
    """200 pairs: each has one slice of either arm; either comes first in 35 to 65 % of them; the same salt gives the same order again."""
    clock = Clock()
    switchback = made(clock)
    firsts = []
    for pair in range(200):
        arms = [switchback.slice_arm(100.0 + 20.0 * pair + at_s) for at_s in (1.0, 11.0)]
        assert set(arms) == {CANDIDATE, INCUMBENT}
        firsts.append(arms[0])
    assert 70 <= firsts.count(CANDIDATE) <= 130
    again = made(clock)
    assert [again.slice_arm(100.0 + 20.0 * pair + 1.0) for pair in range(200)] == firsts


def test_users_and_sessions_keep_their_arm():
    """Over ten slices each user's and session's calls stay with one arm while others alternate; a user in several sessions is one; after
    `sticky_s` of silence the arm is the slice's; the next stage begins with the arms of the one before."""
    clock = Clock()
    switchback = made(clock)
    seen: dict[str, set[str]] = {}
    alone = set()
    for _ in range(10):
        for i in range(5):
            seen.setdefault(f"u{i}", set()).add(switchback.arm_of(call(user=f"u{i}", session=f"s{i}-{clock.now_s}"), clock()))
            seen.setdefault(f"s{i}", set()).add(switchback.arm_of(call(session=f"s{i}"), clock()))
        alone.add(switchback.arm_of(call(), clock()))
        clock.now_s += 10.0
    assert all(len(arms) == 1 for arms in seen.values()) and alone == {CANDIDATE, INCUMBENT}
    (before,) = seen["u0"]
    later = made(clock, before=switchback)
    assert later.arm_of(call(user="u0"), clock()) == before
    clock.now_s += 61.0
    while later.current_arm() == before:
        clock.now_s += 10.0
    assert later.arm_of(call(user="u0"), clock()) != before


def test_arms_are_remembered_with_their_silence():
    """Another process's clock: what was silent for 20 s keeps its arm for 40 s more, what is no arm is left out, and who was met since
    keeps what it got."""
    clock = Clock()
    switchback = made(clock)
    was = {name: switchback.arm_of(call(user=name), clock()) for name in ("a", "b")}
    other = {CANDIDATE: INCUMBENT, INCUMBENT: CANDIDATE}
    kept = [(key, other[arm], silent_s + 20.0) for key, arm, silent_s in switchback.kept()]
    later_clock = Clock()
    later_clock.now_s = 7.0
    later = made(later_clock)
    met = later.arm_of(call(user="b"), later_clock())
    later.remember([*kept, (1, "nobody's", 0.0)])
    assert {arm for _, arm, _ in later.kept()} <= {CANDIDATE, INCUMBENT} and len(later.kept()) == 2
    later_clock.now_s += 39.0
    assert later.arm_of(call(user="a"), later_clock()) == other[was["a"]]
    assert later.arm_of(call(user="b"), later_clock()) == met


def test_what_is_compared():
    """Of six calls of a pair: the first comes in the washout, one is sticky to the other arm, one was left by its caller, one was too long:
    the caller's fault. Two are compared: a good one with the candidate, a late one of double weight with the incumbent."""
    clock = Clock()
    switchback = made(clock)
    while switchback.current_arm() != CANDIDATE or (clock.now_s - 100.0) % 20.0:
        clock.now_s += 10.0
    base_s = clock.now_s
    ends = []
    clock.now_s = base_s + 1.0
    ends.append(ended(switchback, clock, call(user="washout")))
    clock.now_s = base_s + 3.0
    ends.append(ended(switchback, clock, call(user="good")))
    ends.append(ended(switchback, clock, call(user="left"), end="left"))
    ends.append(ended(switchback, clock, call(user="long"), end="too_long"))
    clock.now_s = base_s + 13.0
    ends.append(ended(switchback, clock, call(user="good")))  # sticky: the candidate's
    ends.append(ended(switchback, clock, call(user="late", class_index=1), first_s=3.0, took_s=4.0))
    assert [account.arm for account in ends] == [CANDIDATE] * 5 + [INCUMBENT]
    for account in ends:
        switchback.call_ended(account)
    clock.now_s = base_s + 20.0
    (pair,) = switchback.pairs_over()
    ours, theirs = pair.sums[CANDIDATE], pair.sums[INCUMBENT]
    assert (ours.calls, ours.served, ours.weight, ours.met) == (1, 1, 1.0, 1.0)
    assert (theirs.calls, theirs.served, theirs.weight, theirs.met) == (1, 1, 2.0, 0.0)
    stats = canary_stats(0.05, 4)
    stats.take_pair(pair, 1)
    assert stats.goodput.count == 1 and stats.goodput.mean == pytest.approx(1.0) and stats.served.mean == pytest.approx(0.0)
    assert stats.goodput.error_chance == pytest.approx(0.05 / 8)


def test_a_pair_waits_for_its_calls_but_not_for_ever():
    clock = Clock()
    switchback = made(clock)
    clock.now_s += 5.0
    slow, lost = ended(switchback, clock, call()), ended(switchback, clock, call())
    clock.now_s += 20.0
    assert switchback.pairs_over() == []
    switchback.call_ended(slow)
    assert switchback.pairs_over() == []
    clock.now_s += LINGER_S
    assert [pair.open for pair in switchback.pairs_over()] == [1]
    switchback.call_ended(lost)  # too late, and no harm
    stats = canary_stats(0.05, 4)
    stats.take_pair(replace(switchback._pair_at(clock())), 1)
    assert stats.pairs_left_out == 1 and stats.goodput.count == 0


def test_refused_calls_count_as_not_served():
    clock = Clock()
    switchback = made(clock, washout_s=0.0)
    account = ended(switchback, clock, call(), end="queue_full")
    switchback.call_ended(account)
    clock.now_s += 20.0
    (pair,) = switchback.pairs_over()
    assert pair.sums[account.arm].calls == 1 and pair.sums[account.arm].served == 0 and pair.sums[account.arm].met == 0.0


def test_a_call_at_the_seam_belongs_to_the_pair_it_arrived_in():
    """It arrives 1 ms before the pair ends and is asked for its arm 1 ms after: counted in and out of the same pair, nothing stays open."""
    clock = Clock()
    switchback = made(clock)
    asked, arrival_s = call(), clock() + 20.0 - 0.001
    clock.now_s += 20.001
    account = CallAccount(asked, arrival_s, switchback.arm_of(asked, arrival_s), DONE)
    account.first_s, account.last_s, account.tokens = clock(), clock(), 1
    assert switchback.pairs_over() == []
    switchback.call_ended(account)
    assert [pair.number for pair in switchback.pairs_over()] == [0] and not switchback._pairs
