"""The written gates of a rollout: the keys under `rollout` of the service file. Every key has a default and one line of meaning."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Entry(BaseModel):
    """A misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ReplayGate(_Entry):
    """Offline replay, read from the evaluation file. worlds_min: test worlds at least. confidence: of the paired interval over worlds,
    whose lower end must be above gain_min (points of goodput, 0 to 1). allow_shortened: take evaluations of shortened experiments too."""

    worlds_min: int = Field(default=20, ge=2)
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    gain_min: float = Field(default=0.0, ge=-1, le=1)
    allow_shortened: bool = False


class ShadowGate(_Entry):
    """The candidate decides and nobody follows. decisions_min, min_s: how many comparisons and how long at least. every: of how many
    decisions one is asked in shadow. agreement_min, agreement_max: band of the share of equal decisions. regret_max: mean utility that its
    choices are predicted to lose against those made (a request's full weight is 0.5 to 2). fallback_max: share of its answers that would
    not have been followed (late, outside its training range, ...)."""

    decisions_min: int = Field(default=1000, ge=1)
    min_s: float = Field(default=600.0, ge=0)
    every: int = Field(default=1, ge=1)
    agreement_min: float = Field(default=0.02, ge=0, le=1)
    agreement_max: float = Field(default=1.0, ge=0, le=1)
    regret_max: float = Field(default=0.05, ge=0)
    fallback_max: float = Field(default=0.05, ge=0, le=1)


class CanaryGate(_Entry):
    """One canary stage. share: of users and sessions that may meet the candidate, half of the time. calls_min: compared calls of each arm,
    pairs_min: pairs of slices, min_s: seconds, all at least. margin: the difference in goodput, and in the share served, must be shown to
    be above minus this much."""

    share: float = Field(gt=0, le=1)
    calls_min: int = Field(default=200, ge=1)
    pairs_min: int = Field(default=10, ge=2)
    min_s: float = Field(default=1800.0, ge=0)
    margin: float = Field(default=0.1, gt=0, le=2)


CANARY_DEFAULT = (
    CanaryGate(share=0.01, margin=0.5),
    CanaryGate(share=0.10, margin=0.2),
    CanaryGate(share=0.50, calls_min=1000, margin=0.1),
    CanaryGate(share=1.00, calls_min=1000, margin=0.05),
)


class RolloutEntry(_Entry):
    """dir: folder of state, audit log and the bundles in use (none: no rollouts). evidence_key_file: file with the key that evaluation
    files must be signed with (none: their digest alone is checked). automatic: gates promote by themselves; rolling back is automatic in
    any case. slice_s: so long one arm decides before the other has its turn. washout_s: calls that come so early in a slice are not
    compared, as the other arm filled their queues. sticky_s: a user or session keeps its arm until it was silent so long.
    calls_per_slice_min: a pair of slices with fewer compared calls in either is left out. error_chance: that any test of the whole
    rollout ever errs. fallback_max: share of the candidate's canary decisions that others had to make, after fallback_decisions_min.
    faults_max: openings of the candidate's breaker and ends of its process that are forgiven, in one stage. failures_running_max: so many
    failed calls of the candidate in a row end the rollout at once."""

    dir: str | None = None
    evidence_key_file: str | None = None
    automatic: bool = True
    slice_s: float = Field(default=30.0, gt=0)
    washout_s: float = Field(default=5.0, ge=0)
    sticky_s: float = Field(default=600.0, ge=0)
    calls_per_slice_min: int = Field(default=1, ge=1)
    error_chance: float = Field(default=0.05, gt=0, lt=0.5)
    fallback_max: float = Field(default=0.05, ge=0, le=1)
    fallback_decisions_min: int = Field(default=50, ge=1)
    faults_max: int = Field(default=1, ge=0)
    failures_running_max: int = Field(default=20, ge=1)
    replay: ReplayGate = ReplayGate()
    shadow: ShadowGate = ShadowGate()
    canary: tuple[CanaryGate, ...] = Field(default=CANARY_DEFAULT, min_length=1, max_length=16)

    @model_validator(mode="after")
    def _consistent(self) -> RolloutEntry:
        if self.washout_s >= self.slice_s:
            raise ValueError(f"washout_s={self.washout_s} must be less than slice_s={self.slice_s}")
        shares = [gate.share for gate in self.canary]
        if shares != sorted(set(shares)):
            raise ValueError(f"canary: shares {shares} must grow from stage to stage")
        if self.shadow.agreement_min > self.shadow.agreement_max:
            raise ValueError("shadow: agreement_min is above agreement_max")
        return self
