"""From hardware, model and split plan to the coefficient arrays of `step_time`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.domain.plans import SplitPlan, TpGroup
from envs.domain.snapshot import FloatArray
from envs.domain.specs import ModelSpec
from envs.perf_model import step_time as ST
from envs.perf_model.coefficients import KernelProfile, residual_at
from envs.perf_model.coefficients import profile as kernel_profile
from envs.perf_model.memory_fit import kv_bytes_per_token, kv_head_ranges, unit_ranges

KERNELS_PER_LAYER = 4  # QKV, O, gate+up, down: each pays the fixed GEMM overhead once
OVERLAP_FRACTION = 0.0  # engines of 2024 run all-reduce and compute one after the other; a plan may say otherwise


def profiles_of(group: TpGroup) -> tuple[KernelProfile, ...]:
    """The fitted coefficients of each rank's GPU."""
    return tuple(kernel_profile(place.gpu.kernel_profile) for place in group.ranks)


REFERENCE_CONTEXT = 1024  # context at which the attention residuals are read; they are flat around it


def rank_cost_rows(
    group: TpGroup, plan: SplitPlan, profiles: Sequence[KernelProfile] | None = None, with_residuals: bool = False
) -> FloatArray:
    """Coefficients of each rank under `plan`; returns shape (ranks, RANK_COLUMNS), seconds per unit (see `step_time`).

    with_residuals: multiply attention by its measured / roofline residual (the world's side; predictors go without).
    """
    model = group.model
    fitted = profiles_of(group) if profiles is None else profiles
    kv_heads = np.diff(kv_head_ranges(model, unit_ranges(plan.query_heads)), axis=1)[:, 0]
    kv_bytes = kv_bytes_per_token(model, plan)
    rows = np.zeros((len(group.ranks), ST.RANK_COLUMNS))
    for r, (place, profile) in enumerate(zip(group.ranks, fitted, strict=True)):
        flop_per_s = place.gpu.flop_per_s * profile.compute_efficiency * _dtype_speed(model)
        bytes_per_s = place.gpu.memory_bytes_per_s * profile.memory_efficiency
        rows[r] = _one_rank(model, plan, r, kv_heads[r], flop_per_s, bytes_per_s, place.gpu.flop_per_s, profile)
        rows[r, ST.RC_DECODE_KV_S] = kv_bytes[r] / (place.gpu.memory_bytes_per_s * profile.decode_attention_efficiency)
        if with_residuals:
            rows[r, ST.RC_DECODE_KV_S] *= residual_at(profile.decode_residual, REFERENCE_CONTEXT)
            rows[r, ST.RC_PREFILL_PAIR_S] *= residual_at(profile.prefill_residual, REFERENCE_CONTEXT)
    return rows


def _dtype_speed(model: ModelSpec) -> float:
    """8-bit weights double the tensor-core rate where hardware has it; weight-only 4-bit computes in 16 bits."""
    return 2.0 if model.weight_dtype == "fp8" else 1.0


def _one_rank(
    model: ModelSpec,
    plan: SplitPlan,
    r: int,
    kv_heads: float,
    flop_per_s: float,
    bytes_per_s: float,
    peak_flop_per_s: float,
    profile: KernelProfile,
) -> FloatArray:
    heads = plan.query_heads[r]
    columns = plan.mlp_blocks[r] * plan.mlp_block
    attention_numbers = model.layers * model.hidden * model.head_dim * (2.0 * heads + 2.0 * kv_heads)
    mlp_numbers = model.layers * columns * model.mlp_numbers_per_column
    active_share = model.experts_active / model.experts if model.experts else 1.0
    head_numbers = float(plan.vocabulary_rows[r] * model.hidden)
    row = np.zeros(ST.RANK_COLUMNS)
    row[ST.RC_ATTENTION_TOKEN_S] = 2.0 * attention_numbers / flop_per_s
    row[ST.RC_ATTENTION_WEIGHT_S] = attention_numbers * model.weight_number_bytes / bytes_per_s
    pair_flop = 4.0 * heads * model.head_dim * model.layers  # query x key and weight x value, 2 FLOP each
    row[ST.RC_PREFILL_PAIR_S] = pair_flop / (peak_flop_per_s * profile.prefill_attention_efficiency)
    row[ST.RC_MLP_TOKEN_S] = 2.0 * mlp_numbers * active_share / flop_per_s
    row[ST.RC_MLP_WEIGHT_S] = mlp_numbers * model.weight_number_bytes / bytes_per_s
    row[ST.RC_HEAD_SEQUENCE_S] = 2.0 * head_numbers / flop_per_s
    row[ST.RC_HEAD_WEIGHT_S] = head_numbers * model.weight_number_bytes / bytes_per_s
    if heads or columns:
        kernels = KERNELS_PER_LAYER * profile.gemm_overhead_s + profile.attention_overhead_s + profile.elementwise_overhead_s
        row[ST.RC_OVERHEAD_S] = model.layers * kernels
        numbers = 8.0 * model.hidden + 2.0 * (heads + kv_heads) * model.head_dim + 3.0 * columns * max(1, model.experts_active)
        row[ST.RC_ELEMENTWISE_TOKEN_S] = model.layers * 2.0 * numbers * profile.elementwise_s_per_byte
    return row


def group_cost_row(
    group: TpGroup,
    comm_alpha_s: float,
    comm_beta_s_per_byte: float,
    profiles: Sequence[KernelProfile] | None = None,
    overlap_fraction: float = OVERLAP_FRACTION,
) -> FloatArray:
    """Group-wide coefficients, shape (GROUP_COLUMNS,).

    Two all-reduces a layer of hidden x 2 bytes per token, one over the output head's partial results per step;
    host time is that of the slowest profile, divided by the host's relative speed.
    """
    model = group.model
    fitted = profiles_of(group) if profiles is None else profiles
    reduces = 2 * model.layers if len(group.ranks) > 1 else 0
    row = np.zeros(ST.GROUP_COLUMNS)
    row[ST.GC_COMM_ALPHA_S] = reduces * comm_alpha_s
    row[ST.GC_COMM_TOKEN_S] = reduces * model.hidden * 2.0 * comm_beta_s_per_byte
    row[ST.GC_OVERLAP_FRACTION] = overlap_fraction
    row[ST.GC_HOST_BASE_S] = max(p.step_base_s for p in fitted) / group.host_speed
    row[ST.GC_HOST_SEQUENCE_S] = max(p.step_per_sequence_s for p in fitted) / group.host_speed
    row[[ST.GC_HOST_SLOW, ST.GC_LINK_SLOW, ST.GC_INTERFERENCE]] = 1.0
    row[ST.GC_EXPERTS] = model.experts
    row[ST.GC_EXPERTS_ACTIVE] = model.experts_active
    return row


def residual_rows(group: TpGroup, profiles: Sequence[KernelProfile] | None = None) -> FloatArray:
    """Measured / roofline GEMM multipliers of each rank, shape (ranks, RESIDUAL_BINS)."""
    fitted = profiles_of(group) if profiles is None else profiles
    return np.array([p.gemm_residual for p in fitted], dtype=np.float64)
