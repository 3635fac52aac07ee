"""The written gates: which of them hold, and what follows. Pure: counts and settings in, verdict out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.rollout.settings import CanaryGate, RolloutEntry, ShadowGate
from runtime.rollout.stage_stats import CanaryStats, ShadowStats

Move = Literal["wait", "promote", "roll_back"]


@dataclass(frozen=True, slots=True)
class Gate:
    """One line of the written gates. is_harm: not passed, it ends the rollout; else it only keeps it waiting. value: a number, words, or
    None where nothing was counted yet."""

    name: str
    wanted: str
    value: float | str | None
    is_passed: bool
    is_harm: bool = False

    def __str__(self) -> str:
        value = "not known yet" if self.value is None else self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        return f"{self.name}: {value} (wanted {self.wanted})"


@dataclass(frozen=True, slots=True)
class Verdict:
    move: Move
    reason: str
    gates: tuple[Gate, ...]


def verdict(gates: list[Gate]) -> Verdict:
    """Harm first, then what is missing."""
    harm = [gate for gate in gates if gate.is_harm and not gate.is_passed]
    if harm:
        return Verdict("roll_back", str(harm[0]), tuple(gates))
    missing = [gate for gate in gates if not gate.is_passed]
    if missing:
        return Verdict("wait", "; ".join(map(str, missing)), tuple(gates))
    return Verdict("promote", "every gate passed", tuple(gates))


def shadow_gates(gate: ShadowGate, stats: ShadowStats, policy_fault: str) -> list[Gate]:
    """policy_fault: what is wrong with the candidate's process or its breaker now, "" for nothing."""
    is_known = stats.decisions >= gate.decisions_min
    gates = [
        _policy_gate(policy_fault),
        _at_least("decisions", stats.decisions, gate.decisions_min),
        _at_least("seconds", stats.seconds, gate.min_s),
    ]
    agreement, regret, fallback = stats.agreement, stats.regret, stats.fallback_share
    is_within = agreement is not None and gate.agreement_min <= agreement <= gate.agreement_max
    gates.append(Gate("agreement", f"{gate.agreement_min:g} to {gate.agreement_max:g}", agreement, is_within, is_known))
    gates.append(Gate("predicted regret", f"<= {gate.regret_max:g}", regret, regret is None or regret <= gate.regret_max, is_known))
    is_low = fallback is not None and fallback <= gate.fallback_max
    gates.append(Gate("fallback share", f"<= {gate.fallback_max:g}", fallback, is_low, is_known))
    return gates


def canary_gates(settings: RolloutEntry, gate: CanaryGate, stats: CanaryStats, policy_fault: str, agreement: float | None) -> list[Gate]:
    """agreement: share of the candidate's decisions that equal the heuristic's, None before a full window."""
    shadow, candidate = settings.shadow, stats.candidate
    fallback = candidate.fallback_share
    is_known = candidate.decisions >= settings.fallback_decisions_min
    is_low = fallback is None or not is_known or fallback <= settings.fallback_max
    is_within = agreement is None or shadow.agreement_min <= agreement <= shadow.agreement_max
    failures = stats.failures_running
    gates = [
        _policy_gate(policy_fault),
        Gate("fallback share", f"<= {settings.fallback_max:g}", fallback, is_low, True),
        Gate("agreement", f"{shadow.agreement_min:g} to {shadow.agreement_max:g}", agreement, is_within, True),
        Gate("failed calls running", f"< {settings.failures_running_max}", failures, failures < settings.failures_running_max, True),
    ]
    for name, test in (("goodput", stats.goodput), ("share served", stats.served)):
        gates.append(Gate(f"{name}: not shown to be worse", "upper end >= 0", test.high, test.high >= 0.0, True))
        gates.append(Gate(f"{name}: shown to be no worse", f"lower end > {-gate.margin:g}", test.low, test.low > -gate.margin))
    for name, arm in (("candidate", candidate), ("incumbent", stats.incumbent)):
        gates.append(_at_least(f"compared calls of the {name}", arm.calls, gate.calls_min))
    gates.append(_at_least("pairs of slices", stats.goodput.count, gate.pairs_min))
    gates.append(_at_least("seconds", stats.seconds, gate.min_s))
    return gates


def _policy_gate(fault: str) -> Gate:
    return Gate("candidate's process and breaker", "well", fault or "well", not fault, True)


def _at_least(name: str, value: float, least: float) -> Gate:
    return Gate(name, f">= {least:g}", value, value >= least)
