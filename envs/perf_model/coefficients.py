"""Fitted kernel coefficients per GPU ("kernel profiles"), read from the JSON beside this module.

Knows how fast measured GPUs run GEMMs, attention, small kernels, all-reduces and whole steps, relative to their
datasheet peaks. Leaves to others how a layer is made of operations. Fitted by `calibration.fit_coefficients`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from envs.domain.suggestions import unknown_name

FloatArray = npt.NDArray[np.float64]

SCHEMA_VERSION = 1
TOKEN_KNOTS = 15
"""`gemm_residual[i]` holds at 2**i tokens, i = 0..14."""
CONTEXT_KNOTS = 18
"""`prefill_residual[i]` and `decode_residual[i]` hold at a context of 2**i tokens, i = 0..17."""
ERROR_KEYS = ("mean", "median", "p90", "rows")
EFFICIENCY_MAX = 1.15
"""A card that boosts above the clock of its datasheet can exceed 1 (RTX 4090: 1.0)."""


@dataclass(frozen=True, slots=True)
class EagerHost:
    """An engine without CUDA graphs (vLLM of 2023): step = max(device_s, floor * layers) + base + per_sequence * sequences.

    Decode and prefill have their own floor, base_s and per_sequence_s. The host launches kernel by kernel, so a short
    device step waits for it. extra_beta_s_per_byte, by `ranks`: what one all-reduced byte took in prefill beyond the
    profile's beta.
    """

    base_s: float
    per_sequence_s: float
    decode_floor_s_per_layer: float
    prefill_base_s: float
    prefill_per_sequence_s: float
    prefill_floor_s_per_layer: float
    ranks: tuple[int, ...]
    extra_beta_s_per_byte: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("base_s", "per_sequence_s", "prefill_base_s", "prefill_per_sequence_s", "decode_floor_s_per_layer",
                     "prefill_floor_s_per_layer"):  # fmt: skip
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"EagerHost: {name}={getattr(self, name)} must be seconds in [0, 1); did milliseconds slip in?")
        if len(self.ranks) != len(self.extra_beta_s_per_byte):
            raise ValueError(
                f"EagerHost: extra_beta_s_per_byte={self.extra_beta_s_per_byte} needs one entry per rank count of {self.ranks}"
            )

    def step_s(self, device_s: float, layers: int, sequences: float, is_prefill: bool) -> float:
        """Seconds of a whole step whose device work takes `device_s`."""
        if is_prefill:
            host_s = self.prefill_base_s + self.prefill_per_sequence_s * sequences
            return max(device_s, self.prefill_floor_s_per_layer * layers) + host_s
        return max(device_s, self.decode_floor_s_per_layer * layers) + self.base_s + self.per_sequence_s * sequences


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """What one GPU's kernels reach. All times are of one rank; efficiencies are fractions of datasheet peaks.

    The formulas that the numbers were fitted for (s, bytes, FLOP; `peak` = GpuSpec.flop_per_s, `bw` = memory_bytes_per_s):
      GEMM, m tokens: residual(gemm_residual, m) * max(flop / (peak * compute_efficiency),
          weight_bytes / (bw * memory_efficiency)) + gemm_overhead_s; four a layer (QKV, output, gate and up, down).
          Activation bytes are in the residual.
      prefill attention: residual(prefill_residual, context) * flop / (peak * prefill_attention_efficiency)
          + attention_overhead_s, flop = 4 * heads * head_dim * (chunk * past + chunk**2 / 2), causal
      decode attention: residual(decode_residual, context) * kv_bytes / (bw * decode_attention_efficiency)
          + attention_overhead_s
      small kernels of a layer (norms, rope, activation, adds): elementwise_overhead_s + elementwise_s_per_byte
          * activation_bytes, which are 2 * tokens * (8 * hidden + 2 * (query + key) width + 3 * MLP width), widths the rank's
      all-reduce over r ranks of one host: alpha[r] + beta[r] * bytes; alpha of a captured CUDA graph, the eager one apart
      step: layers + output head + step_base_s + step_per_sequence_s * sequences, an engine of 2026 with CUDA graphs;
          an eager engine of 2023 is `eager`, where it was measured
    Leaving the residuals of attention out costs accuracy: compare held_out_error "..._plain" with the family itself.
    all_reduce_link names the link of that host; with all_reduce_uses_link_bandwidth only alpha is to be trusted.
    `cross_node_all_reduce` rows are (ranks, ranks per node, alpha_s, beta_s_per_byte), for checking link models only.
    `borrowed` names the fields' families ("attention", "elementwise", "all_reduce", "step") that were not measured on this
    GPU, with whose numbers stand in. Empty all_reduce_* tuples: not measured, use the links.
    """

    name: str
    compute_efficiency: float
    memory_efficiency: float
    gemm_overhead_s: float
    gemm_residual: tuple[float, ...]
    prefill_attention_efficiency: float
    prefill_residual: tuple[float, ...]
    decode_attention_efficiency: float
    decode_residual: tuple[float, ...]
    attention_overhead_s: float
    elementwise_s_per_byte: float
    elementwise_overhead_s: float
    step_base_s: float
    step_per_sequence_s: float
    eager: EagerHost | None
    all_reduce_link: str
    all_reduce_uses_link_bandwidth: bool
    all_reduce_ranks: tuple[int, ...]
    all_reduce_alpha_s: tuple[float, ...]
    all_reduce_beta_s_per_byte: tuple[float, ...]
    all_reduce_eager_alpha_s: tuple[float, ...]
    cross_node_all_reduce: tuple[tuple[float, float, float, float], ...]
    borrowed: Mapping[str, str]
    provenance: Mapping[str, str]
    held_out_error: Mapping[str, Mapping[str, float]]

    def __post_init__(self) -> None:
        for name in ("compute_efficiency", "memory_efficiency", "prefill_attention_efficiency", "decode_attention_efficiency"):
            self._require(name, 0.0 < getattr(self, name) <= EFFICIENCY_MAX, f"must lie in (0, {EFFICIENCY_MAX}]")
        for name in (
            "gemm_overhead_s",
            "attention_overhead_s",
            "elementwise_s_per_byte",
            "elementwise_overhead_s",
            "step_base_s",
            "step_per_sequence_s",
        ):
            self._require(name, 0.0 <= getattr(self, name) < 1.0, "must be seconds in [0, 1); did milliseconds slip in?")
        tables = {"gemm_residual": TOKEN_KNOTS, "prefill_residual": CONTEXT_KNOTS, "decode_residual": CONTEXT_KNOTS}
        for name, knots in tables.items():
            table = getattr(self, name)
            self._require(name, len(table) == knots, f"needs {knots} entries, one per power of two")
            self._require(name, all(0.1 <= value <= 10.0 for value in table), "must lie in [0.1, 10]: measured / roofline")
        self._check_all_reduce()
        self._require("provenance", "gemm" in self.provenance, "must at least say where the GEMM coefficients come from")

    def _check_all_reduce(self) -> None:
        ranks = self.all_reduce_ranks
        self._require("all_reduce_ranks", list(ranks) == sorted(set(ranks)) and min(ranks, default=2) >= 2, "must rise from 2")
        for name in ("all_reduce_alpha_s", "all_reduce_beta_s_per_byte", "all_reduce_eager_alpha_s"):
            values = getattr(self, name)
            self._require(name, len(values) == len(ranks), f"needs one entry per rank count {ranks}")
            self._require(name, all(0.0 < value < 1.0 for value in values), "must be positive seconds")

    def _require(self, field: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(
                f"KernelProfile {self.name!r}: {field}={getattr(self, field)} {what}; refit with python -m calibration.fit_coefficients"
            )

    def all_reduce_affine(self, ranks: int, eager: bool = False) -> tuple[float, float] | None:
        """(alpha_s, beta_s_per_byte) measured for `ranks` ranks of one host; None outside the measured rank counts.

        Between two measured counts (3, 5, 6, 7) both are interpolated linearly over the count.
        """
        if not self.all_reduce_ranks or not self.all_reduce_ranks[0] <= ranks <= self.all_reduce_ranks[-1]:
            return None
        alphas = self.all_reduce_eager_alpha_s if eager else self.all_reduce_alpha_s
        alpha_s = float(np.interp(ranks, self.all_reduce_ranks, alphas))
        return alpha_s, float(np.interp(ranks, self.all_reduce_ranks, self.all_reduce_beta_s_per_byte))


def residual_at(table: FloatArray | tuple[float, ...], quantity: FloatArray | float) -> FloatArray:
    """Value of a residual table at a quantity in tokens: linear over log2(quantity), constant beyond either end.

    Args: table of shape (knots,), knot i at 2**i; quantity of any shape, values below 1 count as 1.
    Returns: float64 of quantity's shape.
    """
    knots = np.arange(len(table), dtype=np.float64)
    return np.asarray(np.interp(np.log2(np.maximum(quantity, 1.0)), knots, np.asarray(table, dtype=np.float64)), dtype=np.float64)


def parse_profiles(document: Mapping[str, Any]) -> dict[str, KernelProfile]:
    """Turn the JSON document into profiles. Raises ValueError on a wrong schema, missing, unknown or non-finite values."""
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"coefficients: schema_version={document.get('schema_version')!r}, this code reads {SCHEMA_VERSION}; "
            "refit with python -m calibration.fit_coefficients"
        )
    return {name: _parse_profile(name, entry) for name, entry in document["profiles"].items()}


def _parse_profile(name: str, entry: Mapping[str, Any]) -> KernelProfile:
    wanted = {field.name for field in fields(KernelProfile)} - {"name"}
    if set(entry) != wanted:
        missing, extra = sorted(wanted - set(entry)), sorted(set(entry) - wanted)
        raise ValueError(f"kernel profile {name!r}: missing keys {missing}, unknown keys {extra}; refit the coefficients")
    values: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "held_out_error":
            values[key] = MappingProxyType({family: _parse_error(name, family, error) for family, error in value.items()})
        elif key in ("borrowed", "provenance"):
            values[key] = MappingProxyType({str(k): str(v) for k, v in value.items()})
        elif key == "all_reduce_link":
            values[key] = str(value)
        elif key == "all_reduce_uses_link_bandwidth":
            values[key] = bool(value)
        elif key == "eager":
            values[key] = None if value is None else _parse_eager(name, value)
        elif key == "all_reduce_ranks":
            values[key] = tuple(int(item) for item in value)
        elif key == "cross_node_all_reduce":
            values[key] = tuple(tuple(_finite(name, key, item) for item in row) for row in value)
        elif isinstance(value, list):
            values[key] = tuple(_finite(name, key, item) for item in value)
        else:
            values[key] = _finite(name, key, value)
    return KernelProfile(name=name, **values)


def _parse_eager(name: str, value: Mapping[str, Any]) -> EagerHost:
    wanted = {field.name for field in fields(EagerHost)}
    if set(value) != wanted:
        raise ValueError(f"kernel profile {name!r}: eager has keys {sorted(value)}, wanted {sorted(wanted)}; refit")
    scalars = {key: _finite(name, f"eager.{key}", item) for key, item in value.items() if not isinstance(item, list)}
    return EagerHost(
        ranks=tuple(int(item) for item in value["ranks"]),
        extra_beta_s_per_byte=tuple(_finite(name, "eager.extra_beta_s_per_byte", item) for item in value["extra_beta_s_per_byte"]),
        **scalars,
    )


def _parse_error(name: str, family: str, error: Mapping[str, Any]) -> Mapping[str, float]:
    if set(error) != set(ERROR_KEYS):
        raise ValueError(f"kernel profile {name!r}: held_out_error {family!r} has keys {sorted(error)}, wanted {sorted(ERROR_KEYS)}")
    return MappingProxyType({key: _finite(name, f"{family}.{key}", value) for key, value in error.items()})


def _finite(name: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"kernel profile {name!r}: {key}={value!r} is no finite number; refit the coefficients")
    return float(value)


def _reject_constant(text: str) -> float:
    raise ValueError(f"coefficients.json holds {text}; only finite numbers are allowed, refit the coefficients")


@lru_cache(maxsize=1)
def _packaged_profiles() -> Mapping[str, KernelProfile]:
    text = (resources.files("envs.perf_model") / "coefficients.json").read_text(encoding="utf-8")
    return MappingProxyType(parse_profiles(json.loads(text, parse_constant=_reject_constant)))


def load_profiles() -> dict[str, KernelProfile]:
    """All packaged profiles by name (read once, a fresh dict each call). Raises ValueError if the file is malformed."""
    return dict(_packaged_profiles())


def profile(name: str) -> KernelProfile:
    """The packaged profile of that name, or of `FILE.json#NAME` from a file of the same form, as `python -m runtime calibrate` writes.

    Raises: ValueError naming the nearest and all known names, or what is wrong with the file.
    """
    path, mark, inner = name.rpartition("#")
    known = _file_profiles(path, _modified_ns(path)) if mark else _packaged_profiles()
    wanted = inner if mark else name
    if wanted not in known:
        raise ValueError((f"{path}: " if mark else "") + unknown_name("kernel profile", wanted, known))
    return known[wanted]


def _modified_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise ValueError(f"kernel profiles {path!r} cannot be read: {error.strerror}; calibrate again, or move the file back") from None


@lru_cache(maxsize=16)
def _file_profiles(path: str, modified_ns: int) -> Mapping[str, KernelProfile]:
    """Read once per version of the file."""
    try:
        with open(path, encoding="utf-8") as file:
            return MappingProxyType(parse_profiles(json.load(file, parse_constant=_reject_constant)))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"kernel profiles {path!r}: not a file of kernel profiles ({error})") from error
