"""The replay gate: a signed evaluation must show, with confidence, that the candidate beats the incumbent on the same worlds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from agents.evaluation_file import EvaluationFile, EvaluationFileError, read_evaluation_file
from agents.policy_bundle import bundle_digests, no_bundle
from agents.statistics import bootstrap_interval, paired_differences
from agents.whole_files import read_plain_file
from runtime.rollout.settings import ReplayGate
from runtime.rollout.state import RolloutError

LEARNED_ROWS = {"route": "ppo_route", "joint": "ppo_joint"}
"""Row of an evaluation's results in which a bundle of this kind decided about routes."""
KEY_BYTES_MAX = 1 << 16
SEED = 20261130  # of the bootstrap: the same file gives the same verdict


class BadEvaluation(RolloutError):
    """The file is not what `agents.evaluate` wrote; the message names the key and its value."""


def read_key(path: str | None) -> bytes | None:
    """Raises: RolloutError."""
    if path is None:
        return None
    try:
        return read_plain_file(path, KEY_BYTES_MAX).strip()
    except OSError as error:
        raise RolloutError(f"rollout.evidence_key_file: {path}: {error.strerror}") from error


def replay_verdict(
    gate: ReplayGate,
    bundle: Path,
    evaluation: Path,
    incumbent: str | Path,
    incumbent_evaluation: Path | None = None,
    key: bytes | None = None,
) -> dict[str, Any]:
    """Summary of a gate that was passed. incumbent: a heuristic's name, or a bundle's folder, whose evaluation is then given too.

    Raises: RolloutError saying what is missing or not good enough.
    """
    found = _read(evaluation, key)
    ours = _goodput(found, evaluation, _row_of(found, bundle, evaluation))
    if isinstance(incumbent, str):
        theirs = _goodput(found, evaluation, incumbent)
    else:
        if incumbent_evaluation is None:
            raise RolloutError(
                f"the incumbent is the bundle {incumbent}: give its evaluation on the same worlds too (--incumbent-evaluation)"
            )
        other = _read(incumbent_evaluation, key)
        theirs = _goodput(other, incumbent_evaluation, _row_of(other, incumbent, incumbent_evaluation))
        for what in ("world_names", "trace_name"):
            if other.results.get(what) != found.results.get(what):
                raise RolloutError(
                    f"{incumbent_evaluation.name}: its {what} differ from those of {evaluation.name}; evaluate on the same worlds"
                )
    if found.results.get("is_shortened") and not gate.allow_shortened:
        raise RolloutError(f"{evaluation.name}: made with a shortened experiment; run it whole, or set rollout.replay.allow_shortened")
    if len(ours) < gate.worlds_min:
        raise RolloutError(f"{evaluation.name}: {len(ours)} test worlds; rollout.replay.worlds_min is {gate.worlds_min}")
    interval = bootstrap_interval(paired_differences(ours, theirs), np.random.default_rng(SEED), confidence=gate.confidence)
    said = f"{interval.estimate:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}] goodput over {interval.worlds} worlds"
    if interval.low <= gate.gain_min:
        raise RolloutError(f"replay gate: {said} against {incumbent}; the lower end must be above {gate.gain_min:g}")
    return {
        "evaluation": str(evaluation), "experiment": found.experiment, "against": str(incumbent), "is_signed": key is not None,
        "gain": interval.estimate, "low": interval.low, "high": interval.high, "worlds": interval.worlds, "confidence": gate.confidence,
    }  # fmt: skip


def _read(path: Path, key: bytes | None) -> EvaluationFile:
    try:
        return read_evaluation_file(path, key)
    except (EvaluationFileError, ValueError) as error:
        raise BadEvaluation(str(error)) from error


def check_readable(evaluation: Path) -> None:
    """Raises: BadEvaluation. Whom it is of, and whether it is good enough, is the gate's to say."""
    _read(evaluation, None)


def _row_of(found: EvaluationFile, bundle: Path, evaluation: Path) -> str:
    """The results' row that this very bundle made."""
    try:
        digests = bundle_digests(bundle)
    except OSError as error:
        raise RolloutError(no_bundle(bundle)) from error
    for kind, row in LEARNED_ROWS.items():
        if found.bundles.get(kind) == digests:
            return row
    raise RolloutError(f"{evaluation.name}: it is not of the bundle {bundle} (its digests differ); evaluate this bundle")


def _goodput(found: EvaluationFile, evaluation: Path, row: str) -> np.ndarray:
    policies = found.results.get("policies", {})
    if row not in policies:
        raise RolloutError(
            f"{evaluation.name}: holds no results of {row} (it has {', '.join(sorted(policies))}); evaluate with --heuristic route={row}"
        )
    return np.array([world["goodput"] for world in policies[row]], np.float64)
