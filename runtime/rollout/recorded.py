"""Offline replay of recorded decisions: what a bundle would have chosen where the service chose, without a cluster and without requests."""

from __future__ import annotations

from pathlib import Path

from agents.policy_bundle import BundleError, load_bundle
from envs.decision.observation import CONTEXT, FEATURES, OBSERVATION_VERSION
from runtime.records.decision_records import DecisionFile, RecordError
from runtime.rollout.stage_stats import ShadowStats


def compare_with_records(bundle: Path, records: Path) -> list[str]:
    """Lines that tell of agreement and predicted regret. Raises: RecordError."""
    try:
        policy = load_bundle(bundle)
    except BundleError as error:
        raise RecordError(str(error)) from error
    files = sorted(records.glob("decisions-*.jsonl")) if records.is_dir() else [records]
    if not files:
        raise RecordError(f"{records}: holds no decisions-*.jsonl; record with --record-dir")
    stats, torn, without = ShadowStats(), 0, 0
    for path in files:
        file = DecisionFile(path)
        if (
            file.head.observation_version != OBSERVATION_VERSION
            or file.head.features != list(FEATURES)
            or file.head.context != list(CONTEXT)
        ):
            raise RecordError(f"{path}: observation version {file.head.observation_version}; this program encodes {OBSERVATION_VERSION}")
        for record in file:
            observation, allowed, groups = record.observation(), record.allowed, len(file.head.groups)
            if observation is None or not allowed[:groups].any():
                without += 1
                continue
            stats.decisions += 1
            try:
                index = policy.choose(*observation, allowed)
            except ValueError as error:
                stats.note_fallback(type(error).__name__)
                continue
            if policy.out_of_range(*observation, allowed):
                stats.note_fallback("outside_training")
                continue
            stats.good += 1
            stats.agreed += index == record.chosen
            if record.utility is not None and max(index, record.chosen) < groups:
                stats.regrets += 1
                stats.regret_total += record.utility[record.chosen] - record.utility[index]
        torn += file.torn
    return [
        f"{stats.decisions} decisions of {len(files)} file(s); {without} without observation or choice, {torn} unfinished line(s) left out",
        f"agreement          {_shown(stats.agreement)}",
        f"predicted regret   {_shown(stats.regret)} utility a decision",
        f"not to be followed {_shown(stats.fallback_share)} {stats.fallbacks or ''}".rstrip(),
    ]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
