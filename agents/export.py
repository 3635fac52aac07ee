"""From a trained policy to a bundle, after proving that both decide alike. Writes nothing when they do not."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.policies.candidate_policy import CandidatePolicy
from agents.policy_bundle import (
    TIE_TOLERANCE,
    BundleContents,
    BundleError,
    BundlePolicy,
    BundleSchema,
    NetworkShape,
    Scaling,
    load_bundle,
    write_bundle,
)

logger = logging.getLogger(__name__)

PARITY_OBSERVATIONS = 10_000
SCORE_TOLERANCE = 1e-4
_TIE_EDGE = 5e-6
_BATCH = 500
_PACKAGES = ("numpy", "torch", "gymnasium", "stable-baselines3", "sb3-contrib", "safetensors", "simpy", "numba")

Observation = dict[str, np.ndarray]


class ParityError(RuntimeError):
    """The exported policy would decide differently; nothing was written."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Outcome of the comparison. `at_tie_edge`: observations left out and drawn anew because two scores differ by just
    the tie tolerance, where float32 rounding alone decides."""

    observations: int
    decisions_different: int
    score_difference_max: float
    at_tie_edge: int


def bundle_contents(
    policy: CandidatePolicy, schema: BundleSchema, evaluation: Mapping[str, Any], provenance: Mapping[str, Any]
) -> BundleContents:
    """Copy weights and scaling out of the trained policy.

    Raises: BundleError when the scaling was never fitted (fault K03) or the schema's sizes differ from the policy's.
    """
    if not bool(policy.normaliser.is_fitted):
        raise BundleError("the policy's observation scaling was never fitted; a policy without its scaling is not exported")
    sizes = (policy.features, policy.context_features, policy.candidates_max)
    named = (len(schema.feature_names), len(schema.context_names), schema.candidates_max)
    if sizes != named:
        raise BundleError(f"policy has (features, context, candidates) {sizes}; the schema names {named}")
    scaling = {name: _array(getattr(policy.normaliser, name)) for name in Scaling.ARRAYS}
    return BundleContents(
        schema=schema,
        network=NetworkShape(policy.hidden, policy.activation),
        scaling=Scaling(**scaling, clip=float(policy.normaliser.clip)),
        weights={name: _array(tensor) for name, tensor in policy.scorer.state_dict().items()},
        evaluation=dict(evaluation),
        provenance=dict(provenance),
    )


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().astype(np.float32, copy=True)


def export_bundle(
    policy: CandidatePolicy,
    directory: str | os.PathLike[str],
    schema: BundleSchema,
    *,
    evaluation: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    recorded: Sequence[Observation] = (),
    seed: int = 0,
    observations: int = PARITY_OBSERVATIONS,
) -> ParityReport:
    """Write the bundle beside its place, load it as the service would, compare, and only then put it in place.

    Args: recorded: observations from training or evaluation to compare first; the rest is random and extreme.
    Raises: ParityError, BundleError, FileExistsError; in each case `directory` is left as it was.
    """
    target = Path(directory)
    if target.exists():
        raise FileExistsError(f"{target} exists; bundles are never overwritten, choose a new directory")
    contents = bundle_contents(policy, schema, evaluation or {}, provenance or {})
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        loaded = load_bundle(write_bundle(staging / "bundle", contents), schema)
        report = check_parity(policy, loaded, np.random.default_rng(seed), observations, recorded)
        os.rename(staging / "bundle", target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    logger.info("exported bundle observations=%d score_difference_max=%.2e", report.observations, report.score_difference_max)
    return report


def check_parity(
    policy: CandidatePolicy,
    bundle: BundlePolicy,
    rng: np.random.Generator,
    observations: int = PARITY_OBSERVATIONS,
    recorded: Sequence[Observation] = (),
) -> ParityReport:
    """Compare decisions and scores of the trained policy and the loaded bundle.

    The policy decides on padded batches, as in training; the bundle on one observation at a time with the padding cut
    off, as in service. Raises: ParityError on the first batch with another decision or a score off by more than 1e-4.
    """
    compared, at_edge, difference_max = 0, 0, 0.0
    waiting = list(recorded) + extreme_observations(policy, bundle)
    while compared < observations:
        while len(waiting) < _BATCH:
            waiting.append(random_observation(policy, bundle, rng))
        batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
        decisions, scores = _torch_decisions(policy, batch)
        different = 0
        for index, observation in enumerate(batch):
            if compared == observations:
                break
            if _is_at_tie_edge(scores[index], observation["mask"] > 0.5):
                at_edge += 1
                continue
            decision, difference = _bundle_against(bundle, observation, scores[index])
            difference_max = max(difference_max, difference)
            different += decision != decisions[index]
            compared += 1
        if different or not difference_max <= SCORE_TOLERANCE:
            raise ParityError(
                f"exported policy differs in {different} of {len(batch)} decisions, scores by up to {difference_max:.3g} "
                f"(allowed {SCORE_TOLERANCE}); nothing was written"
            )
        if at_edge > observations:
            raise ParityError(f"{at_edge} observations lie on the edge of a tie; the policy's scores are too close to compare")
    return ParityReport(compared, 0, difference_max, at_edge)


def _torch_decisions(policy: CandidatePolicy, batch: Sequence[Observation]) -> tuple[np.ndarray, np.ndarray]:
    """The path used in evaluation: `predict` with masks, and the scores behind it."""
    stacked = {key: np.stack([observation[key] for observation in batch]) for key in batch[0]}
    decisions, _ = policy.predict(stacked, deterministic=True, action_masks=stacked["mask"] > 0.5)
    with torch.no_grad():
        scores = policy.scores({key: torch.from_numpy(value) for key, value in stacked.items()}).numpy()
    return decisions, scores


def _bundle_against(bundle: BundlePolicy, observation: Observation, scores: np.ndarray) -> tuple[int, float]:
    """The bundle's decision on the unpadded observation, and its largest difference in score on allowed candidates."""
    allowed = observation["mask"] > 0.5
    real = int(np.flatnonzero(allowed)[-1]) + 1
    parts = observation["candidates"][:real], observation["context"], observation["mask"][:real]
    ours = bundle.scores(*parts)
    return bundle.choose(*parts), float(np.abs(ours - scores[:real])[allowed[:real]].max())


def _is_at_tie_edge(scores: np.ndarray, allowed: np.ndarray) -> bool:
    """Whether some allowed score lies so near (best - tolerance) that rounding decides which side it is on."""
    legal = scores[allowed]
    return bool((np.abs(legal.max() - legal - TIE_TOLERANCE) < _TIE_EDGE).any())


def random_observation(policy: CandidatePolicy, bundle: BundlePolicy, rng: np.random.Generator) -> Observation:
    """Any number of candidates, values from narrow to far outside the training range, a random mask that is not empty."""
    maximum = policy.candidates_max
    count = int(rng.integers(1, maximum + 1))
    spread = float(rng.choice([0.1, 1.0, 3.0, 10.0]))
    low, high = policy.observation_space["candidates"].low.min(), policy.observation_space["candidates"].high.max()  # type: ignore[index]
    scaling = bundle.contents.scaling
    candidates = np.zeros((maximum, policy.features), dtype=np.float32)
    drawn = scaling.candidate_mean + spread * scaling.candidate_scale * rng.normal(size=(count, policy.features))
    candidates[:count] = np.clip(drawn, low, high)
    context = scaling.context_mean + spread * scaling.context_scale * rng.normal(size=policy.context_features)
    mask = np.zeros(maximum, dtype=np.float32)
    mask[:count] = rng.random(count) < rng.choice([0.3, 0.8, 1.0])
    mask[int(rng.integers(count))] = 1.0
    return {"candidates": candidates, "context": np.clip(context, low, high).astype(np.float32), "mask": mask}


def extreme_observations(policy: CandidatePolicy, bundle: BundlePolicy) -> list[Observation]:
    """All zero, all at either bound, at the ends of the training range, with one, two, half and most candidates."""
    maximum = policy.candidates_max
    scaling = bundle.contents.scaling
    space = policy.observation_space
    ends = [
        (np.zeros(policy.features), np.zeros(policy.context_features)),
        (space["candidates"].low[0], space["context"].low),  # type: ignore[index]
        (space["candidates"].high[0], space["context"].high),  # type: ignore[index]
        (space["candidates"].low[0], space["context"].high),  # type: ignore[index]
        (scaling.candidate_low, scaling.context_low),
        (scaling.candidate_high, scaling.context_high),
    ]
    observations = []
    for row, context in ends:
        for count in sorted({1, min(2, maximum), max(1, maximum // 2), maximum}):
            candidates = np.zeros((maximum, policy.features), dtype=np.float32)
            candidates[:count] = row
            mask = np.zeros(maximum, dtype=np.float32)
            mask[:count] = 1.0
            observations.append({"candidates": candidates, "context": np.asarray(context, dtype=np.float32), "mask": mask})
    return observations


def collect_provenance(config: Any, seeds: Sequence[int], repository: str | os.PathLike[str] = ".") -> dict[str, Any]:
    """Commit, configuration (a dataclass or mapping) with its digest, seeds and package versions, as plain JSON values."""
    values = dict(config) if isinstance(config, Mapping) else asdict(config)
    text = json.dumps(values, sort_keys=True, default=str)
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "absent"
    return {
        "commit": _git_commit(repository),
        "config": json.loads(text),
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "seeds": [int(seed) for seed in seeds],
        "packages": packages,
    }


def _git_commit(repository: str | os.PathLike[str]) -> str:
    """Commit id, with "+changes" when the working tree differs from it; "unknown" outside a repository."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, timeout=10, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=repository, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if status.stdout.strip() else "")


class _OnnxScores(torch.nn.Module):
    """Scaling and scorer as one graph."""

    def __init__(self, policy: CandidatePolicy) -> None:
        super().__init__()
        self.normaliser, self.scorer = policy.normaliser, policy.scorer

    def forward(self, candidates: torch.Tensor, context: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.scorer(*self.normaliser(candidates, context), mask)


def export_onnx(policy: CandidatePolicy, path: str | os.PathLike[str]) -> str:
    """Write scaling and scorer as ONNX where the `onnx` package is installed; returns what was done, in words.

    The bundle is what the service uses; this is for other programs. Candidates are padded to the training maximum.
    """
    if importlib.util.find_spec("onnx") is None:
        return "ONNX skipped: the onnx package is not installed"
    shapes = (1, policy.candidates_max, policy.features), (1, policy.context_features), (1, policy.candidates_max)
    batch = {name: {0: "batch"} for name in ("candidates", "context", "mask", "scores")}
    torch.onnx.export(
        _OnnxScores(policy).eval(),
        tuple(torch.ones(shape) for shape in shapes),
        str(path),
        input_names=["candidates", "context", "mask"],
        output_names=["scores"],
        dynamic_axes=batch,
        dynamo=False,
    )
    return f"ONNX written to {path}"
