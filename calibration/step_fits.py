"""End-to-end fits: layer tables of whole layers (Helix) and whole iterations (splitwise-sim) against summed operations.

Knows how a step is put together from a KernelProfile's numbers, in the same form as `envs.perf_model.step_time`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, nnls

from calibration.kernel_fits import AttentionFit, GemmFit, fit_residual, score, split_rows
from calibration.measurements import FloatArray, Peaks
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
    for tp, group in rows.groupby("tp"):
        batch, prompt, output = (group[name].to_numpy(float) for name in ("batch", "prompt", "output"))
        zero = np.zeros_like(batch)
        if phase == "prompt":
            work = (batch * prompt, batch, batch * prompt**2 / 2.0, zero)
        else:
            work = (batch, batch, zero, batch * (prompt + output / 2.0))
        total_s[rows["tp"].to_numpy() == tp] = operations_s(kernels, LLAMA2_70B, int(tp), *work)
    return total_s


@dataclass(frozen=True, slots=True)
class StepFit:
    """Host time of a step and the eager floor, with scores on held-out rows."""

    base_s: float
    per_sequence_s: float
    eager_floor_s_per_layer: float
    errors: dict[str, dict[str, float]]


def fit_splitwise(kernels: Kernels, rows: pd.DataFrame, rng: np.random.Generator) -> StepFit:
    """Host time per decode step from token_s less the operations, the eager floor from the smallest prompts.

    decode: measured = operations + base + per_sequence * batch, non-negative, in relative error.
    prefill: measured = max(operations, floor * layers) + base + per_sequence * batch, floor in log error.
    """
    fitted, held = split_rows(len(rows), rng)
    operations = splitwise_operations_s(kernels, rows, "token")
    measured = rows["token_s"].to_numpy(float)
    batch = rows["batch"].to_numpy(float)
    design = np.stack([np.ones_like(batch), batch], axis=1) / measured[:, None]
    target = (measured - operations) / measured
    (base_s, per_sequence_s), _ = nnls(design[fitted], target[fitted])
    host_s = base_s + per_sequence_s * batch
    prompt_operations = splitwise_operations_s(kernels, rows, "prompt")
    prompt = rows["prompt_s"].to_numpy(float)

    def floor_errors(theta: FloatArray) -> FloatArray:
        predicted = np.maximum(prompt_operations, theta[0] * 1e-3 * LLAMA2_70B.layers) + host_s
        return np.asarray(np.log(predicted[fitted] / prompt[fitted]))

    floor_s = float(least_squares(floor_errors, x0=[0.6], bounds=([0.0], [5.0]), loss="soft_l1", f_scale=0.1).x[0]) * 1e-3
    errors = {
        "decode_iteration": score((operations + host_s)[held], measured[held]),
        "decode_operations_only": score(operations[held], measured[held]),
        "prefill_iteration": score((np.maximum(prompt_operations, floor_s * LLAMA2_70B.layers) + host_s)[held], prompt[held]),
        "prefill_operations_only": score(prompt_operations[held], prompt[held]),
    }
    return StepFit(float(base_s), float(per_sequence_s), floor_s, errors)


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
    kv_width = rows["model"].map({name: dense.kv_heads * dense.head_dim * 4.0 for name, dense in HELIX_MODELS.items()}).to_numpy(float)
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
    gemm = GemmFit(float(theta[0]), float(theta[1]), 0.0, residual)
    predicted = layer_s(theta, residual_at(residual, tokens))
    plain = layer_s(theta)
    scores = {"gemm": score(predicted[held], measured[held]), "gemm_plain": score(plain[held], measured[held])}
    return HelixFit(gemm, float(theta[2]) * 1e-9, scores)
