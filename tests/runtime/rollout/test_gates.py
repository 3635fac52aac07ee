"""The written gates by hand: harm goes before everything, what is missing is named, and margins mean what they say."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from runtime.rollout.gates import canary_gates, shadow_gates, verdict
from runtime.rollout.settings import CanaryGate, RolloutEntry, ShadowGate
from runtime.rollout.stage_stats import ShadowStats, canary_stats
from runtime.rollout.switchback import ArmSums, SlicePair

SHADOW = ShadowGate(decisions_min=100, min_s=10.0, agreement_min=0.2, agreement_max=0.9, regret_max=0.1, fallback_max=0.1)
CANARY = CanaryGate(share=0.1, calls_min=50, pairs_min=20, min_s=60.0, margin=0.3)


def shadow(decisions: int = 100, good: int = 95, agreed: int = 60, regret: float = 0.05, seconds: float = 10.0) -> ShadowStats:
    return ShadowStats(seconds, decisions, good, agreed, good, regret * good, 0, {"deadline": decisions - good})


@pytest.mark.parametrize(
    ("stats", "fault", "move", "said"),
    [
        (shadow(), "", "promote", "every gate"),
        (shadow(decisions=99, good=94), "", "wait", "decisions: 99 (wanted >= 100)"),
        (shadow(seconds=9.0), "", "wait", "seconds: 9"),
        (shadow(agreed=10), "", "roll_back", "agreement: 0.1053 (wanted 0.2 to 0.9)"),
        (shadow(agreed=90), "", "roll_back", "agreement"),
        (shadow(regret=0.11), "", "roll_back", "predicted regret: 0.11"),
        (shadow(good=89), "", "roll_back", "fallback share: 0.11"),
        (shadow(decisions=50, good=40, agreed=0), "", "wait", "decisions: 50"),  # too few to call it harm
        (shadow(), "its process ended", "roll_back", "its process ended"),
        (ShadowStats(), "", "wait", "not known yet"),
    ],
)
def test_shadow(stats, fault, move, said):
    found = verdict(shadow_gates(SHADOW, stats, fault))
    assert found.move == move and said in found.reason, found.reason


def canary(difference: float, pairs: int, seconds: float = 60.0):
    """So many pairs of slices of ten calls each, the candidate's goodput `difference` off the incumbent's 0.8."""
    stats = canary_stats(0.05, 4)
    for number in range(pairs):
        sums = {"incumbent": ArmSums(10, 10, 10.0, 8.0), "candidate": ArmSums(10, 10, 10.0, 10.0 * (0.8 + difference))}
        stats.take_pair(SlicePair(number, 0.0, 1.0, 0, sums), 1)
    stats.seconds = seconds
    return stats


@pytest.mark.parametrize(
    ("stats", "agreement", "move", "said"),
    [
        (canary(0.0, 80), None, "promote", "every gate"),
        (canary(0.0, 80), 0.5, "promote", "every gate"),
        (canary(0.0, 80), 0.01, "roll_back", "agreement"),
        (canary(0.0, 10), None, "wait", "pairs of slices: 10"),
        (canary(0.0, 80, seconds=5.0), None, "wait", "seconds"),
        (canary(-0.1, 30), None, "wait", "goodput: shown to be no worse"),
        (canary(-0.4, 100), None, "roll_back", "goodput: not shown to be worse"),
        (canary(0.2, 80), None, "promote", "every gate"),
    ],
)
def test_canary(stats, agreement, move, said):
    found = verdict(canary_gates(RolloutEntry(), CANARY, stats, "", agreement))
    assert found.move == move and said in found.reason, found.reason


def test_faults_of_the_candidate_are_harm():
    stats = canary(0.0, 80)
    stats.failures_running = 20
    assert verdict(canary_gates(RolloutEntry(), CANARY, stats, "", None)).move == "roll_back"
    stats = canary(0.0, 80)
    stats.candidate.decisions, stats.candidate.fallbacks = 49, {"deadline": 49}
    assert verdict(canary_gates(RolloutEntry(), CANARY, stats, "", None)).move == "promote"  # too few to say
    stats.candidate.decisions = 50
    assert "fallback share" in verdict(canary_gates(RolloutEntry(), CANARY, stats, "", None)).reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"washout_s": 30.0},
        {"canary": [{"share": 0.5}, {"share": 0.1}]},
        {"canary": []},
        {"shadow": {"agreement_min": 1.0, "agreement_max": 0.0}},
        {"slise_s": 1},
    ],
)
def test_settings_that_contradict_themselves(wrong):
    with pytest.raises(ValidationError):
        RolloutEntry(**wrong)
