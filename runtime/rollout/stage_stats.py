"""What a stage has counted so far: in shadow, how the candidate's choices compare; in a canary, how its calls fare. Plain numbers that are
put down now and then, so that a restart goes on counting."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.rollout.sequential_test import MeanTest
from runtime.rollout.state import RolloutError
from runtime.rollout.switchback import ARMS, CANDIDATE, INCUMBENT, SlicePair


class ShadowStats(msgspec.Struct):
    """decisions: the candidate was asked. good: its answers that could have been followed. fallbacks: the others, by cause. agreed: good
    ones equal to what was done. regrets, regret_total: of how many, and how much utility they are predicted to lose. skipped: it could
    not be asked, as too many questions were open."""

    seconds: float = 0.0
    decisions: int = 0
    good: int = 0
    agreed: int = 0
    regrets: int = 0
    regret_total: float = 0.0
    skipped: int = 0
    fallbacks: dict[str, int] = {}

    def note_fallback(self, cause: str) -> None:
        self.fallbacks[cause] = self.fallbacks.get(cause, 0) + 1

    @property
    def agreement(self) -> float | None:
        return self.agreed / self.good if self.good else None

    @property
    def regret(self) -> float | None:
        return self.regret_total / self.regrets if self.regrets else None

    @property
    def fallback_share(self) -> float | None:
        return sum(self.fallbacks.values()) / self.decisions if self.decisions else None


class ArmStats(msgspec.Struct):
    """One arm of a canary. calls, served, weight, met: of the compared ones, as in `ArmSums`. all_calls: those too that are not compared.
    decisions, fallbacks: of this arm, and those that its policy did not make, by cause."""

    calls: int = 0
    served: int = 0
    weight: float = 0.0
    met: float = 0.0
    all_calls: int = 0
    decisions: int = 0
    fallbacks: dict[str, int] = {}

    @property
    def goodput(self) -> float | None:
        return self.met / self.weight if self.weight else None

    @property
    def served_share(self) -> float | None:
        return self.served / self.calls if self.calls else None

    @property
    def fallback_share(self) -> float | None:
        return sum(self.fallbacks.values()) / self.decisions if self.decisions else None


class CanaryStats(msgspec.Struct):
    """goodput, served: tests of candidate less incumbent, one value per pair of slices. pairs_left_out: with too few calls."""

    goodput: MeanTest
    served: MeanTest
    seconds: float = 0.0
    pairs_left_out: int = 0
    failures_running: int = 0
    incumbent: ArmStats = msgspec.field(default_factory=ArmStats)
    candidate: ArmStats = msgspec.field(default_factory=ArmStats)

    def arm(self, name: str) -> ArmStats:
        return self.candidate if name == CANDIDATE else self.incumbent

    def take_pair(self, pair: SlicePair, calls_min: int) -> None:
        """A pair of slices is over."""
        for arm in ARMS:
            sums, stats = pair.sums[arm], self.arm(arm)
            stats.calls += sums.calls
            stats.served += sums.served
            stats.weight += sums.weight
            stats.met += sums.met
        ours, theirs = pair.sums[CANDIDATE], pair.sums[INCUMBENT]
        if min(ours.calls, theirs.calls) < calls_min:
            self.pairs_left_out += 1
            return
        self.goodput.add(ours.goodput - theirs.goodput)
        self.served.add(ours.served_share - theirs.served_share)


def canary_stats(error_chance: float, canary_stages: int) -> CanaryStats:
    """Fresh counts: the rollout's error chance is shared out evenly over its tests, two in each canary stage."""
    each = error_chance / (2 * canary_stages)
    return CanaryStats(MeanTest(each), MeanTest(each))


def read_stats(kind: type[Any], kept: dict[str, Any]) -> Any:
    """Counts as they were put down. Raises: RolloutError."""
    try:
        return msgspec.convert(kept, kind)
    except msgspec.ValidationError as error:
        raise RolloutError(f"the stage's counts cannot be read ({error})") from error
