"""End-to-end fits: layer tables of whole layers (Helix) and whole iterations (splitwise-sim) against summed operations.

Knows how a step is put together from a KernelProfile's numbers, in the same form as `envs.perf_model.step_time`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, nnls

from calibration.kernel_fits import AttentionFit, GemmFit, fit_residual, never_faster_with_more_tokens, score, split_rows
from calibration.measurements import BoolArray, FloatArray, Peaks
from envs.perf_model.coefficients import TOKEN_KNOTS, residual_at

NUMBER_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class Dense:
    """Shape of a dense decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int

    @property
    def layer_numbers(self) -> float:
        return self.hidden * self.head_dim * 2.0 * (self.heads + self.kv_heads) + 3.0 * self.hidden * self.mlp


LLAMA2_70B = Dense(80, 8192, 64, 8, 128, 28672, 32000)
LLAMA1_30B = Dense(60, 6656, 52, 52, 128, 17920, 32000)
LLAMA31_8B = Dense(32, 4096, 32, 8, 128, 14336, 128256)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The fitted kernel numbers of one GPU that a step is summed from; small kernels as (alpha_s, s per activation byte)."""

    peaks: Peaks
    gemm: GemmFit
    prefill: AttentionFit
    decode: AttentionFit
    elementwise: tuple[float, float]
    all_reduce: dict[int, tuple[float, float]]


def operations_s(
    kernels: Kernels, model: Dense, tp: int, tokens: FloatArray, sequences: FloatArray, pairs: FloatArray, kv_tokens: FloatArray
) -> FloatArray:
    """Seconds of all device work of one step of one rank: layers, small kernels, all-reduces, output head.

    Args: shape (rows,): tokens computed, sequences needing logits, query-key pairs of prefill, KV tokens read by decode.
    Attention's own residuals are left out, as in `envs.perf_model.step_time`.
    """
    gemm, peaks = kernels.gemm, kernels.peaks
    flop_per_s = peaks.flop_per_s * gemm.compute_efficiency
    bytes_per_s = peaks.memory_bytes_per_s * gemm.memory_efficiency
    bend = residual_at(gemm.residual, tokens)
    attention_numbers = model.hidden * model.head_dim * 2.0 * (model.heads / tp + max(model.kv_heads / tp, 1.0))
    mlp_numbers = 3.0 * model.hidden * model.mlp / tp
    layer_s = np.zeros_like(tokens)
    for numbers in (attention_numbers, mlp_numbers):
        layer_s += np.maximum(2.0 * numbers * tokens / flop_per_s, NUMBER_BYTES * numbers / bytes_per_s) * bend
    layer_s += 4.0 * gemm.overhead_s
    layer_s += 4.0 * model.heads / tp * model.head_dim * pairs / (peaks.flop_per_s * kernels.prefill.efficiency)
    kv_bytes = 2.0 * NUMBER_BYTES * max(model.kv_heads / tp, 1.0) * model.head_dim * kv_tokens
    layer_s += kv_bytes / (peaks.memory_bytes_per_s * kernels.decode.efficiency)
    layer_s += np.where(kv_tokens > 0, kernels.decode.overhead_s, kernels.prefill.overhead_s)
    width = 8 * model.hidden + 2 * (model.heads / tp + max(model.kv_heads / tp, 1.0)) * model.head_dim + 3 * model.mlp / tp
    layer_s += kernels.elementwise[0] + kernels.elementwise[1] * 2.0 * tokens * width
    if tp > 1:
        alpha_s, beta = kernels.all_reduce[tp]
        layer_s += 2.0 * (alpha_s + beta * NUMBER_BYTES * tokens * model.hidden)
    head_numbers = model.vocabulary * model.hidden / tp
    head_s = np.maximum(2.0 * head_numbers * sequences / flop_per_s, NUMBER_BYTES * head_numbers / bytes_per_s)
    return model.layers * layer_s + head_s


def splitwise_operations_s(kernels: Kernels, rows: pd.DataFrame, phase: str) -> FloatArray:
    """Summed operations of splitwise-sim's Llama-2-70B iterations: phase "prompt" or "token"; shape (rows,)."""
    total_s = np.zeros(len(rows))
    for tp in sorted(set(rows["tp"])):
        group = rows[rows["tp"] == tp]
        batch, prompt, output = (group[name].to_numpy(float) for name in ("batch", "prompt", "output"))
        zero = np.zeros_like(batch)
        if phase == "prompt":
            work = (batch * prompt, batch, batch * prompt**2 / 2.0, zero)
        else:
            work = (batch, batch, zero, batch * (prompt + output / 2.0))
        total_s[rows["tp"].to_numpy() == tp] = operations_s(kernels, LLAMA2_70B, int(tp), *work)
    return total_s


@dataclass(frozen=True, slots=True)
class HostFit:
    """Host time of a step of a current engine with CUDA graphs: base_s + per_sequence_s * sequences, added to the device's."""

    base_s: float
    per_sequence_s: float
    errors: dict[str, dict[str, float]]


def fit_vllm_run(kernels: Kernels, seconds: pd.DataFrame, rng: np.random.Generator) -> HostFit:
    """Host time from seconds of a served run in which no prompt was computed: step = running / generated per second.

    Args: `seconds` with columns sequences, kv_tokens, step_s (see measurements.vllm_run_seconds), Llama-3.1-8B on one GPU.
    """
    fitted, held = split_rows(len(seconds), rng)
    batch, kv_tokens, measured = (seconds[name].to_numpy(float) for name in ("sequences", "kv_tokens", "step_s"))
    operations = operations_s(kernels, LLAMA31_8B, 1, batch, batch, np.zeros_like(batch), kv_tokens)
    design = np.stack([np.ones_like(batch), batch], axis=1) / measured[:, None]
    (base_s, per_sequence_s), _ = nnls(design[fitted], ((measured - operations) / measured)[fitted])
    host_s = base_s + per_sequence_s * batch
    return HostFit(
        float(base_s),
        float(per_sequence_s),
        {
            "served_decode_step": score((operations + host_s)[held], measured[held]),
            "served_decode_operations_only": score(operations[held], measured[held]),
        },
    )


@dataclass(frozen=True, slots=True)
class EagerFit:
    """An eager engine's step: max(device, floor * layers) + base + per_sequence * sequences, decode and prefill apart.

    extra_beta_s_per_byte: by rank count (2, 4, 8), what a byte of an all-reduce took beyond the custom kernel's beta in prefill.
    """

    base_s: float
    per_sequence_s: float
    decode_floor_s_per_layer: float
    prefill_base_s: float
    prefill_per_sequence_s: float
    prefill_floor_s_per_layer: float
    extra_beta_s_per_byte: dict[int, float]
    errors: dict[str, dict[str, float]]


SPLITWISE_RANKS = (2, 4, 8)
TP2_KV_TOKENS_MAX = 18_000
"""KV tokens of Llama-2-70B that two 80 GB cards hold beside the weights (0.9 * 160 GB - 138 GB, 328 kB a token).

Rows beyond it ran in waves: their prompt_time is the first wave's only, so they say nothing of an iteration.
"""


def fits_memory(rows: pd.DataFrame) -> BoolArray:
    """Mask of splitwise rows whose whole batch fits at once."""
    return np.asarray((rows["tp"] > 2) | (rows["batch"] * (rows["prompt"] + rows["output"]) <= TP2_KV_TOKENS_MAX), dtype=np.bool_)


def fit_splitwise(kernels: Kernels, rows: pd.DataFrame, rng: np.random.Generator) -> EagerFit:
    """Fit the eager host to splitwise-sim's decode iterations (token_s), then floor and extra beta to its prompts."""
    rows = rows[fits_memory(rows)].reset_index(drop=True)
    fitted, held = split_rows(len(rows), rng)
    layers = LLAMA2_70B.layers
    batch = rows["batch"].to_numpy(float)
    decode_operations, token = splitwise_operations_s(kernels, rows, "token"), rows["token_s"].to_numpy(float)

    def decode_s(theta: FloatArray) -> FloatArray:  # ms a layer, ms, ms a sequence
        return np.asarray(np.maximum(decode_operations, theta[0] * 1e-3 * layers) + (theta[1] + theta[2] * batch) * 1e-3)

    decode = least_squares(
        lambda theta: np.log(decode_s(theta) / token)[fitted],
        x0=[0.4, 8.0, 0.1],
        bounds=([0.0, 0.0, 0.0], [2.0, 50.0, 5.0]),
        loss="soft_l1",
        f_scale=0.05,
    ).x
    prompt_operations, prompt = splitwise_operations_s(kernels, rows, "prompt"), rows["prompt_s"].to_numpy(float)
    moved = 2 * layers * NUMBER_BYTES * LLAMA2_70B.hidden * batch * rows["prompt"].to_numpy(float)
    by_ranks = np.stack([(rows["tp"] == ranks).to_numpy() * moved for ranks in SPLITWISE_RANKS], axis=1)

    def prompt_s(theta: FloatArray) -> FloatArray:  # ms a layer, ms, ms a sequence, then s per 1e11 bytes by ranks
        device_s = np.maximum(prompt_operations + by_ranks @ theta[3:] * 1e-11, theta[0] * 1e-3 * layers)
        return np.asarray(device_s + (theta[1] + theta[2] * batch) * 1e-3)

    prefill = least_squares(
        lambda theta: np.log(prompt_s(theta) / prompt)[fitted],
        x0=[0.5, 5.0, 0.5, 0.5, 0.5, 0.5],
        bounds=([0.0] * 6, [2.0, 50.0, 50.0, 50.0, 50.0, 50.0]),
        loss="soft_l1",
        f_scale=0.05,
    ).x
    errors = {
        "eager_decode_iteration": score(decode_s(decode)[held], token[held]),
        "eager_decode_operations_only": score(decode_operations[held], token[held]),
        "eager_prefill_iteration": score(prompt_s(prefill)[held], prompt[held]),
        "eager_prefill_operations_only": score(prompt_operations[held], prompt[held]),
    }
    extra = {ranks: round(float(value) * 1e-11, 15) for ranks, value in zip(SPLITWISE_RANKS, prefill[3:], strict=True)}
    floor_s, base_s, per_sequence_s = (round(float(value) * 1e-3, 9) for value in decode)
    prefill_floor_s, prefill_base_s, prefill_per_sequence_s = (round(float(value) * 1e-3, 9) for value in prefill[:3])
    return EagerFit(base_s, per_sequence_s, floor_s, prefill_base_s, prefill_per_sequence_s, prefill_floor_s, extra, errors)


@dataclass(frozen=True, slots=True)
class HelixFit:
    """Efficiencies of one machine from whole-layer times; decode's KV part in seconds per sequence (context unknown)."""

    gemm: GemmFit
    kv_s_per_sequence_byte: float
    errors: dict[str, dict[str, float]]


HELIX_MODELS = {"llama1_30b": LLAMA1_30B, "llama2_70b": LLAMA2_70B}
HELIX_RESOLUTION_S = 0.5e-3
"""70B prompt times are rounded to 1 ms, others to 0.1 or 1 ms: half a step of absolute error is nobody's fault."""


def fit_helix(rows: pd.DataFrame, peaks: Peaks, rng: np.random.Generator) -> HelixFit:
    """Fit compute and memory efficiency and a per-sequence slope to one machine's prompt and decode layer times.

    layer = max(2 * numbers * tokens / (peak * ce), 2 bytes * numbers / (bw * me)) + [decode] sequences * kv bytes per token * c.
    `c` (s per byte of one token's KV in a layer) absorbs the context length that the tables do not state.
    """
    tokens = rows["batch"].to_numpy(float)
    numbers = rows["model"].map({name: dense.layer_numbers for name, dense in HELIX_MODELS.items()}).to_numpy(float)
    widths = {name: dense.kv_heads * dense.head_dim * 2.0 * NUMBER_BYTES for name, dense in HELIX_MODELS.items()}
    kv_width = rows["model"].map(widths).to_numpy(float)
    kv_bytes = np.where(rows["phase"] == "decode", tokens * kv_width, 0.0)
    measured = rows["measured_s"].to_numpy(float)
    rounding = np.where(np.round(measured * 1e3) == measured * 1e3, HELIX_RESOLUTION_S, 0.1 * HELIX_RESOLUTION_S)
    weight = 1.0 / (1.0 + 10.0 * rounding / measured)
    fitted, held = split_rows(len(rows), rng)

    def layer_s(theta: FloatArray, bend: FloatArray | float = 1.0) -> FloatArray:
        roof = np.maximum(
            2.0 * numbers * tokens / (peaks.flop_per_s * theta[0]), NUMBER_BYTES * numbers / (peaks.memory_bytes_per_s * theta[1])
        )
        return np.asarray(roof * bend + theta[2] * 1e-9 * kv_bytes)

    def errors(theta: FloatArray) -> FloatArray:
        return np.asarray((weight * np.log(layer_s(theta) / measured))[fitted])

    theta = least_squares(errors, x0=[0.5, 0.75, 1.0], bounds=([0.05, 0.05, 0.0], [1.1, 1.1, 100.0]), loss="soft_l1", f_scale=0.1).x
    roof = layer_s(np.array([theta[0], theta[1], 0.0]))
    left = np.maximum(measured - theta[2] * 1e-9 * kv_bytes, 0.2 * measured)
    share = (roof / (roof + theta[2] * 1e-9 * kv_bytes)) ** 2
    residual = fit_residual(tokens[fitted], (left / roof)[fitted], TOKEN_KNOTS, (weight * share)[fitted])
    residual = never_faster_with_more_tokens(residual, peaks, float(theta[0]), float(theta[1]))
    gemm = GemmFit(float(theta[0]), float(theta[1]), 0.0, residual)
    predicted = layer_s(theta, residual_at(residual, tokens))
    plain = layer_s(theta)
    scores = {"gemm": score(predicted[held], measured[held]), "gemm_plain": score(plain[held], measured[held])}
    return HelixFit(gemm, float(theta[2]) * 1e-9, scores)
