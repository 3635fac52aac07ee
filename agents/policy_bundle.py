"""The exported policy: one directory with weights, scaling, feature order and schema, and its evaluation in plain numpy.

Needs numpy and safetensors only, so that the service loads no training library. Loading runs nothing from the file:
JSON and safetensors are read as data, every shape is known beforehand. The format is described in docs/bundle.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as parse_safetensors
from safetensors.numpy import save as dump_safetensors

from agents.whole_files import read_plain_file

Float32Array = NDArray[np.float32]

FORMAT_VERSION = 1
WEIGHTS_FILE = "policy.safetensors"
DESCRIPTION_FILE = "bundle.json"
DESCRIPTION_BYTES_MAX = 1 << 20
WEIGHTS_BYTES_MAX = 32 << 20
WIDTH_MAX = 4096
DECISION_KINDS = ("route", "split", "rebalance", "joint")
SLACK_FRACTION = 0.1
"""Inputs so far beyond the range seen in training, as a share of its width, still count as inside."""
TIE_TOLERANCE = 1e-5
"""Scores this close count as equal and the lowest index wins, so that rounding cannot decide between equal candidates."""


class BundleError(ValueError):
    """The bundle cannot be used; one line says why. The caller goes on with its heuristic."""


class EmptyMask(ValueError):
    """No candidate is allowed; the caller asks its heuristic."""


class NonFiniteScores(ValueError):
    """The network's output is not a number; the caller asks its heuristic."""


class TooManyCandidates(ValueError):
    """More candidates than the policy was padded to in training; it is refused, never truncated."""


@dataclass(frozen=True, slots=True)
class BundleSchema:
    """What the policy's inputs mean. Two sides whose schemas differ do not understand each other."""

    decision_kind: str
    feature_names: tuple[str, ...]
    context_names: tuple[str, ...]
    observation_version: int
    candidates_max: int

    def __post_init__(self) -> None:
        if self.decision_kind not in DECISION_KINDS:
            raise BundleError(f'decision kind "{self.decision_kind}" unknown; known: {", ".join(DECISION_KINDS)}')
        for what, names in (("feature", self.feature_names), ("context", self.context_names)):
            if not 0 < len(names) <= WIDTH_MAX or len(set(names)) != len(names):
                raise BundleError(f"{what} names must be 1 to {WIDTH_MAX} different names; got {len(names)}, {len(set(names))} different")
        if not 0 < self.candidates_max <= WIDTH_MAX:
            raise BundleError(f"candidates_max={self.candidates_max} is outside 1 to {WIDTH_MAX}")

    def digest(self) -> str:
        """SHA-256 over the canonical JSON of all fields."""
        parts = [
            self.decision_kind,
            list(self.feature_names),
            list(self.context_names),
            self.observation_version,
            self.candidates_max,
        ]
        return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """Frozen affine scaling with a clip, and the range of each raw input seen in training. Arrays are float32."""

    candidate_mean: Float32Array
    candidate_scale: Float32Array
    context_mean: Float32Array
    context_scale: Float32Array
    candidate_low: Float32Array
    candidate_high: Float32Array
    context_low: Float32Array
    context_high: Float32Array
    clip: float

    ARRAYS = (
        "candidate_mean",
        "candidate_scale",
        "context_mean",
        "context_scale",
        "candidate_low",
        "candidate_high",
        "context_low",
        "context_high",
    )

    def check(self, features: int, context: int) -> None:
        for name in self.ARRAYS:
            array = getattr(self, name)
            width = features if name.startswith("candidate") else context
            if array.shape != (width,) or not np.isfinite(array).all():
                raise BundleError(
                    f"scaling.{name} must be {width} finite numbers; got {array.size}, {int(np.isfinite(array).sum())} finite"
                )
        if (self.candidate_scale <= 0).any() or (self.context_scale <= 0).any():
            raise BundleError("scaling has a scale that is not positive; export the policy again")
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise BundleError(f"scaling.clip={self.clip} must be a positive number")


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """Sizes of the scorer; the activation is "tanh" or "relu"."""

    hidden: int
    activation: str

    def __post_init__(self) -> None:
        if self.activation not in ("tanh", "relu"):
            raise BundleError(f'activation "{self.activation}" unknown; known: relu, tanh')
        if not 0 < self.hidden <= WIDTH_MAX:
            raise BundleError(f"network.hidden={self.hidden} is outside 1 to {WIDTH_MAX}")

    def tensors(self, features: int, context: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every weight the bundle must hold, and no other."""
        hidden = self.hidden
        return {
            "embed_candidate.weight": (hidden, features),
            "embed_candidate.bias": (hidden,),
            "embed_context.weight": (hidden, context),
            "first_candidate.weight": (hidden, features),
            "first_candidate.bias": (hidden,),
            "first_context.weight": (hidden, context),
            "first_pool.weight": (hidden, 2 * hidden),
            "second.weight": (hidden, hidden),
            "second.bias": (hidden,),
            "out.weight": (1, hidden),
            "out.bias": (1,),
            "residual.weight": (1, features),
        }


@dataclass(frozen=True, slots=True, eq=False)
class BundleContents:
    """Everything a bundle holds, before it is written or after it was read and checked."""

    schema: BundleSchema
    network: NetworkShape
    scaling: Scaling
    weights: Mapping[str, Float32Array]
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise BundleError unless every array is there, finite and of its shape."""
        features, context = len(self.schema.feature_names), len(self.schema.context_names)
        self.scaling.check(features, context)
        expected = self.network.tensors(features, context)
        if set(expected) != set(self.weights):
            missing, extra = sorted(set(expected) - set(self.weights)), sorted(set(self.weights) - set(expected))
            raise BundleError(f"weights do not fit the network: missing {missing or 'none'}, unknown {extra[:5] or 'none'}")
        for name, shape in expected.items():
            array = self.weights[name]
            if array.dtype != np.float32 or array.shape != shape:
                raise BundleError(f"weight {name} is {array.dtype}{list(array.shape)}; expected float32{list(shape)}")
            if not np.isfinite(array).all():
                raise BundleError(f"weight {name} holds a number that is not finite")


class BundlePolicy:
    """A loaded policy. Holds read-only arrays; safe to share between threads. Not changed by use."""

    def __init__(self, contents: BundleContents, digest: str = "") -> None:
        """digest: of the files it was read from."""
        contents.check()
        self.digest = digest
        self.schema = contents.schema
        self.evaluation = dict(contents.evaluation)
        self.provenance = dict(contents.provenance)
        self.contents = contents
        self._relu = contents.network.activation == "relu"
        self._clip = np.float32(contents.scaling.clip)
        scaling, weights = contents.scaling, contents.weights
        self._candidate_mean, self._context_mean = scaling.candidate_mean, scaling.context_mean
        # Multiplying by 1/scale would round differently from training's division.
        self._candidate_scale, self._context_scale = scaling.candidate_scale, scaling.context_scale
        # The two layers that read candidates, and the two that read the context, are one product each.
        hidden = contents.network.hidden
        self._hidden = hidden
        self._by_candidate = np.ascontiguousarray(
            np.concatenate([weights["embed_candidate.weight"], weights["first_candidate.weight"], weights["residual.weight"]]).T
        )
        self._by_context = np.ascontiguousarray(np.concatenate([weights["embed_context.weight"], weights["first_context.weight"]]).T)
        self._context_bias = np.concatenate([weights["embed_candidate.bias"], weights["first_candidate.bias"]])
        self._by_pool = np.ascontiguousarray(weights["first_pool.weight"].T)
        self._second, self._second_bias = np.ascontiguousarray(weights["second.weight"].T), weights["second.bias"]
        self._out, self._out_bias = np.ascontiguousarray(weights["out.weight"][0]), weights["out.bias"][0]
        for array in (self._by_candidate, self._by_context, self._context_bias, self._by_pool, self._second, self._out):
            array.setflags(write=False)
        self._usual = _widened(scaling, SLACK_FRACTION)

    def _activate(self, values: Float32Array) -> Float32Array:
        return np.maximum(values, 0, out=values) if self._relu else np.tanh(values, out=values)

    def _scaled(self, values: Float32Array, mean: Float32Array, scale: Float32Array) -> Float32Array:
        scaled = values - mean
        np.divide(scaled, scale, out=scaled)
        np.maximum(scaled, -self._clip, out=scaled)  # the two that `np.clip` is made of, without its wrapper
        return np.minimum(scaled, self._clip, out=scaled)

    def _check_inputs(self, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray) -> None:
        count, features, width = len(candidates), len(self.schema.feature_names), len(self.schema.context_names)
        if count > self.schema.candidates_max:
            raise TooManyCandidates(f"{count} candidates; this policy was trained with at most {self.schema.candidates_max}")
        if candidates.shape != (count, features) or context.shape != (width,) or mask.shape != (count,):
            raise ValueError(
                f"got candidates {candidates.shape}, context {context.shape}, mask {mask.shape}; expected (C, {features}), ({width},), (C,)"
            )

    def scores(self, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray) -> Float32Array:
        """Score every candidate: candidates (C, F), context (K,), mask (C,) of 0/1 or bool -> float32 (C,), unmasked.

        Rows with mask 0 take no part in the pool, so padding does not change the others' scores.
        Raises: TooManyCandidates; ValueError on a wrong shape.
        """
        candidates = np.asarray(candidates, dtype=np.float32)
        context = np.asarray(context, dtype=np.float32)
        allowed = np.asarray(mask) > 0.5
        self._check_inputs(candidates, context, allowed)
        hidden = self._hidden
        scaled = self._scaled(candidates, self._candidate_mean, self._candidate_scale)
        scaled_context = self._scaled(context, self._context_mean, self._context_scale)
        from_candidate = scaled @ self._by_candidate
        from_context = scaled_context @ self._by_context + self._context_bias
        embedded = self._activate((from_candidate[:, :hidden] + from_context[:hidden])[allowed])
        state = from_context[hidden:]
        if len(embedded):
            mean = np.add.reduce(embedded, axis=0)
            np.divide(mean, np.float32(len(embedded)), out=mean)
            pooled = np.concatenate([mean, np.maximum.reduce(embedded, axis=0)])
            state = state + pooled @ self._by_pool
        first = self._activate(from_candidate[:, hidden : 2 * hidden] + state)
        second = self._activate(first @ self._second + self._second_bias)
        return second @ self._out + self._out_bias + from_candidate[:, 2 * hidden]

    def choose(self, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray) -> int:
        """Index of the best allowed candidate; of scores within TIE_TOLERANCE of the best, the lowest index.

        Raises: EmptyMask, NonFiniteScores, TooManyCandidates: the caller counts it and asks its heuristic.
        """
        return self.choose_scored(candidates, context, mask)[0]

    def choose_scored(self, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray) -> tuple[int, Float32Array]:
        """The same with the scores (C,) behind it, -inf where the mask is 0."""
        allowed = np.asarray(mask) > 0.5
        if not allowed.any():
            raise EmptyMask("no candidate is allowed; ask the heuristic")
        scores = np.where(allowed, self.scores(candidates, context, allowed), np.float32(-np.inf))
        best = scores.max()
        if not np.isfinite(best) or np.isnan(scores).any():
            raise NonFiniteScores("a score is not finite; the observation holds a value that is not a number")
        return int((scores >= best - np.float32(TIE_TOLERANCE)).argmax()), scores

    def out_of_range(
        self, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray, slack_fraction: float = SLACK_FRACTION
    ) -> tuple[str, ...]:
        """Names of inputs outside their training range widened by `slack_fraction` of its width on each side.

        Only rows with mask 1 count. A value that is not finite is always outside.
        """
        bounds = self._usual if slack_fraction == SLACK_FRACTION else _widened(self.contents.scaling, slack_fraction)
        rows = np.asarray(candidates, dtype=np.float32)[np.asarray(mask) > 0.5]
        outside: list[str] = []
        for values, (low, high), names in (
            (rows, bounds[0], self.schema.feature_names),
            (np.asarray(context, dtype=np.float32)[None], bounds[1], self.schema.context_names),
        ):
            inside = (values >= low) & (values <= high)
            if not inside.all():
                outside.extend(names[i] for i in np.flatnonzero(~inside.all(axis=0)))
        return tuple(outside)

    def in_training_range(
        self, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray, slack_fraction: float = SLACK_FRACTION
    ) -> bool:
        """Whether every input lies in the range seen in training; see `out_of_range`."""
        return not self.out_of_range(candidates, context, mask, slack_fraction)


def _widened(scaling: Scaling, slack_fraction: float) -> tuple[tuple[Float32Array, Float32Array], ...]:
    """Training ranges (lows, highs) of candidates and of the context, with `slack_fraction` of their widths on each side."""
    ranges = (scaling.candidate_low, scaling.candidate_high), (scaling.context_low, scaling.context_high)
    slacks = [np.float32(slack_fraction) * (high - low) + np.float32(1e-6) for low, high in ranges]
    return tuple((low - slack, high + slack) for (low, high), slack in zip(ranges, slacks, strict=True))


def write_bundle(directory: str | os.PathLike[str], contents: BundleContents) -> Path:
    """Write a new bundle directory in one step: it is there complete, or not at all.

    Raises: BundleError when the contents are inconsistent; FileExistsError when `directory` exists.
    """
    contents.check()
    target = Path(directory)
    if target.exists():
        raise FileExistsError(f"{target} exists; bundles are never overwritten, choose a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        weights = dump_safetensors({name: np.ascontiguousarray(array) for name, array in contents.weights.items()})
        description = json.dumps(_describe(contents, weights), indent=1, allow_nan=False).encode()
        if len(description) > DESCRIPTION_BYTES_MAX:
            raise BundleError(f"description is {len(description)} bytes; at most {DESCRIPTION_BYTES_MAX}: shorten evaluation or provenance")
        for name, data in ((WEIGHTS_FILE, weights), (DESCRIPTION_FILE, description)):
            with open(temporary / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        temporary.chmod(0o755)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def bundle_digests(directory: Path) -> dict[str, str]:
    """SHA-256 of a bundle's two files, by file name. Raises: OSError."""
    most = {DESCRIPTION_FILE: DESCRIPTION_BYTES_MAX, WEIGHTS_FILE: WEIGHTS_BYTES_MAX}
    return {name: hashlib.sha256(read_plain_file(directory / name, bytes_max)).hexdigest() for name, bytes_max in most.items()}


def bundle_digest(directory: Path) -> str:
    """One digest over a bundle's files. Raises: OSError."""
    return _digest_over(bundle_digests(directory))


def _digest_over(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _describe(contents: BundleContents, weights: bytes) -> dict[str, Any]:
    schema, scaling = contents.schema, contents.scaling
    return {
        "format_version": FORMAT_VERSION,
        "decision_kind": schema.decision_kind,
        "observation_version": schema.observation_version,
        "candidates_max": schema.candidates_max,
        "feature_names": list(schema.feature_names),
        "context_names": list(schema.context_names),
        "schema_sha256": schema.digest(),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "network": {"hidden": contents.network.hidden, "activation": contents.network.activation},
        "scaling": {name: [float(x) for x in getattr(scaling, name)] for name in Scaling.ARRAYS} | {"clip": float(scaling.clip)},
        "evaluation": dict(contents.evaluation),
        "provenance": dict(contents.provenance),
    }


def no_bundle(directory: Path) -> str:
    """That `directory` is no bundle, and which ones lie inside it."""
    said = f"{directory} is not a bundle directory (it should hold {DESCRIPTION_FILE} and {WEIGHTS_FILE})"
    near = [path for pattern in ("*", "bundle/*") for path in sorted(directory.glob(f"{pattern}/{DESCRIPTION_FILE}"))]
    if near:  # a run, or its folder `bundle`
        return f"{said}; give {' or '.join(str(path.parent) for path in near[:4])}"
    return said if directory.is_dir() else f"{said}: there is no such directory"


def load_bundle(path: str | os.PathLike[str], expected: BundleSchema | None = None, digest: str = "") -> BundlePolicy:
    """Read and check a bundle directory; nothing in it is executed.

    Args: expected: the schema of the program that asks; when given, the bundle's must be the same. digest: as `bundle_digest` gave it;
    when given, that of the very bytes that are loaded must be the same.
    Raises: BundleError, one line, for anything that is not a complete, consistent bundle.
    """
    directory = Path(path)
    try:
        if not directory.is_dir() or not any((directory / name).exists() for name in (DESCRIPTION_FILE, WEIGHTS_FILE)):
            raise BundleError(no_bundle(directory))
        text = _read_capped(directory / DESCRIPTION_FILE, DESCRIPTION_BYTES_MAX)
        weights = _read_capped(directory / WEIGHTS_FILE, WEIGHTS_BYTES_MAX)
        found = _digest_over({DESCRIPTION_FILE: hashlib.sha256(text).hexdigest(), WEIGHTS_FILE: hashlib.sha256(weights).hexdigest()})
        if digest and found != digest:
            raise BundleError(f"its files changed (digest {found[:12]}, not {digest[:12]}); have them whole, then reload")
        contents = _contents_from(_parse_json(text), weights)
        if expected is not None:
            _require_same_schema(contents.schema, expected)
        return BundlePolicy(contents, found)
    except BundleError as error:
        raise BundleError(f"{directory.name}: {_one_line(error)}") from error
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise BundleError(f"{directory.name}: not a readable bundle ({type(error).__name__}: {_one_line(error)})") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def _read_capped(path: Path, bytes_max: int) -> bytes:
    """Read a regular file of at most `bytes_max` bytes."""
    if not path.is_file():
        raise BundleError(f"{path.name} is missing")
    try:
        return read_plain_file(path, bytes_max)
    except OSError as error:
        raise BundleError(f"{path.name} {error.strerror}") from error


def _refuse_constant(text: str) -> Any:
    raise BundleError(f"{DESCRIPTION_FILE} holds {text}, which is not JSON")


def _parse_json(data: bytes) -> dict[str, Any]:
    parsed = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    if not isinstance(parsed, dict):
        raise BundleError(f"{DESCRIPTION_FILE} must hold an object; got {type(parsed).__name__}")
    return parsed


def _field(description: Mapping[str, Any], name: str, kind: type) -> Any:
    value = description.get(name)
    # bool is an int to isinstance, but never a size or a version.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BundleError(f"field {name} must be {kind.__name__}; got {type(value).__name__}")
    return value


def _names(description: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values = _field(description, name, list)
    if not all(isinstance(value, str) and len(value) <= 200 for value in values):
        raise BundleError(f"field {name} must be a list of names")
    return tuple(values)


def _floats(scaling: Mapping[str, Any], name: str) -> Float32Array:
    values = _field(scaling, name, list)
    if len(values) > WIDTH_MAX or not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        raise BundleError(f"scaling.{name} must be a list of at most {WIDTH_MAX} numbers")
    array = np.array(values, dtype=np.float32)
    array.setflags(write=False)
    return array


def _contents_from(description: Mapping[str, Any], weights: bytes) -> BundleContents:
    version = _field(description, "format_version", int)
    if version != FORMAT_VERSION:
        raise BundleError(f"format_version={version}; this program reads {FORMAT_VERSION}: export the policy again")
    schema = BundleSchema(
        decision_kind=_field(description, "decision_kind", str),
        feature_names=_names(description, "feature_names"),
        context_names=_names(description, "context_names"),
        observation_version=_field(description, "observation_version", int),
        candidates_max=_field(description, "candidates_max", int),
    )
    if _field(description, "schema_sha256", str) != schema.digest():
        raise BundleError("schema_sha256 does not belong to the feature names and versions listed; the file was changed by hand")
    if _field(description, "weights_sha256", str) != hashlib.sha256(weights).hexdigest():
        raise BundleError(f"{WEIGHTS_FILE} is not the file this description was written with (SHA-256 differs)")
    network = _field(description, "network", dict)
    scaling = _field(description, "scaling", dict)
    clip = scaling.get("clip")
    if not isinstance(clip, (int, float)) or isinstance(clip, bool):
        raise BundleError("scaling.clip must be a number")
    try:
        arrays = parse_safetensors(weights)
    except (SafetensorError, KeyError, AttributeError) as error:
        raise BundleError(f"{WEIGHTS_FILE} is not a safetensors file ({_one_line(error)})") from error
    for array in arrays.values():
        array.setflags(write=False)
    contents = BundleContents(
        schema=schema,
        network=NetworkShape(_field(network, "hidden", int), _field(network, "activation", str)),
        scaling=Scaling(**{name: _floats(scaling, name) for name in Scaling.ARRAYS}, clip=float(clip)),
        weights=arrays,
        evaluation=_field(description, "evaluation", dict),
        provenance=_field(description, "provenance", dict),
    )
    contents.check()
    return contents


def _require_same_schema(found: BundleSchema, expected: BundleSchema) -> None:
    """Name the first difference between two schemas."""
    if found == expected:
        return
    for name in ("decision_kind", "observation_version", "candidates_max"):
        if getattr(found, name) != getattr(expected, name):
            raise BundleError(f"{name} is {getattr(found, name)!r}; this program uses {getattr(expected, name)!r}: train or export again")
    for name in ("feature_names", "context_names"):
        theirs, ours = getattr(found, name), getattr(expected, name)
        if theirs != ours:
            at = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), min(len(theirs), len(ours)))
            raise BundleError(f"{name} differ from this program's at position {at} ({len(theirs)} against {len(ours)} names): export again")
