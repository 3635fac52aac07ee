"""From measured steps to kernel profiles, GPU rows and a link: the very terms that `envs.perf_model` adds up again.

Numpy only. Each rank is fitted by itself. Every third size is held out, and what the simulator's own formula says about those is
compared with what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.domain.plans import LayerPlans, SplitPlan, TpGroup
from envs.domain.snapshot import FloatArray
from envs.domain.specs import ModelSpec
from envs.perf_model import step_time as ST
from envs.perf_model.all_reduce import affine_coefficients
from envs.perf_model.coefficients import CONTEXT_KNOTS, EFFICIENCY_MAX, TOKEN_KNOTS
from envs.perf_model.group_cost import group_cost_row, rank_cost_rows, residual_rows
from runtime.local_measurement import Measurement, ReduceRow, StepRow

EFFICIENCIES = np.geomspace(0.05, EFFICIENCY_MAX, 60)
ACTIVATION_NUMBER_BYTES = 2.0
"""What `envs.perf_model` counts per number of a message or activation; real ones may be wider, which the rates then take in."""

BETA_MIN = 1e-15
"""s/byte: a link whose bandwidth did not show at all still needs one."""


@dataclass(frozen=True, slots=True)
class Work:
    """FLOP and bytes of one rank, summed over layers: per token (GEMM), per query-key pair, per KV token, and of the weights."""

    attention_flop: float
    attention_bytes: float
    mlp_flop: float
    mlp_bytes: float
    head_flop: float
    head_bytes: float
    pair_flop: float
    kv_bytes: float
    activation_numbers: float

    @classmethod
    def of(cls, model: ModelSpec, plan: LayerPlans, rank: int) -> Work:
        """As `envs.perf_model.group_cost` counts them, with per-layer cuts."""
        group = model.query_heads // model.kv_heads
        attention = mlp = pairs = kv = activations = 0.0
        for cut in plan.layers:
            start = sum(cut.query_heads[:rank])
            heads, columns = cut.query_heads[rank], cut.mlp_blocks[rank] * cut.mlp_block
            kv_heads = -(-(start + heads) // group) - start // group if heads else 0
            attention += model.hidden * model.head_dim * (2.0 * heads + 2.0 * kv_heads)
            mlp += columns * model.mlp_numbers_per_column
            pairs += 4.0 * heads * model.head_dim
            kv += 2.0 * kv_heads * model.head_dim
            activations += 8.0 * model.hidden + 2.0 * (heads + kv_heads) * model.head_dim + 3.0 * columns
        head = float(plan.vocabulary_rows[rank] * model.hidden)
        width = model.weight_number_bytes
        return cls(
            2 * attention, attention * width, 2 * mlp, mlp * width, 2 * head, head * width, pairs, kv * model.kv_bytes_per_token
            / (2.0 * model.layers * model.kv_heads * model.head_dim), activations,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankFit:
    """One rank's rates (peaks that its own GEMMs reached) and its kernel profile, in the form of coefficients.json."""

    flop_per_s: float
    memory_bytes_per_s: float
    profile: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link whose ring formula gives back the measured all-reduce."""

    alpha_s: float
    beta_s_per_byte: float


def uniform_plan(plan: LayerPlans) -> SplitPlan:
    """One cut for all layers, as the simulator knows it: the first layer's, heads and columns being alike or off by one over the layers."""
    return plan.layers[0]


def is_held_out(index: int) -> bool:
    return index % 3 == 1


def fit_rank(measurement: Measurement, rank: int) -> RankFit:
    """Raises: ValueError when a rank has no work in one of the operations: nothing can be learnt of it then."""
    rows = [row for row in measurement.steps if row.rank == rank]
    work = Work.of(measurement.model, measurement.plan, rank)
    if min(work.attention_flop, work.mlp_flop, work.head_flop) <= 0 or not rows:
        raise ValueError(
            f"rank {rank} has no work in some operation under plan version {measurement.plan.version}; calibrate an even split"
        )
    fitted = [row for index, row in enumerate(rows) if not is_held_out(index)]
    tokens, mlp_s = _medians([row.tokens for row in rows], [row.mlp_s for row in rows])
    peak_flop, peak_bytes = float((work.mlp_flop * tokens / mlp_s).max()), float((work.mlp_bytes / mlp_s).max())
    compute, memory = _efficiencies(tokens, mlp_s, work.mlp_flop / peak_flop, work.mlp_bytes / peak_bytes)
    roof = np.maximum(work.mlp_flop * tokens / (peak_flop * compute), work.mlp_bytes / (peak_bytes * memory))
    residual = np.clip(np.interp(np.arange(TOKEN_KNOTS), np.log2(tokens), mlp_s / roof), 0.1, 10.0)

    def gemm_s(row: StepRow, flop: float, moved: float) -> float:
        bend = float(np.interp(np.log2(row.tokens), np.arange(TOKEN_KNOTS), residual))
        return bend * max(flop * row.tokens / (peak_flop * compute), moved / (peak_bytes * memory))

    left = np.array([row.attention_s - gemm_s(row, work.attention_flop, work.attention_bytes) for row in fitted])
    columns = np.array([[1.0, row.pairs, row.kv_tokens, row.tokens] for row in fitted])
    weights = 1.0 / np.array([row.attention_s for row in fitted])
    fixed_s, pair_s, kv_s, token_s = non_negative_least_squares(columns * weights[:, None], left * weights)
    layers = measurement.model.layers
    tails = [_host_and_head(row, work, peak_flop * compute, peak_bytes * memory) for row in fitted]
    base_s, sequence_s = non_negative_least_squares(np.array([[1.0, row.sequences] for row in fitted]), np.array(tails))
    profile = {
        "compute_efficiency": compute,
        "memory_efficiency": memory,
        "gemm_overhead_s": 0.0,
        "gemm_residual": [float(value) for value in residual],
        "prefill_attention_efficiency": _efficiency(work.pair_flop, peak_flop, pair_s),
        "prefill_residual": [1.0] * CONTEXT_KNOTS,
        "decode_attention_efficiency": _efficiency(work.kv_bytes, peak_bytes, kv_s),
        "decode_residual": [1.0] * CONTEXT_KNOTS,
        "attention_overhead_s": float(fixed_s) / layers,
        "elementwise_s_per_byte": float(token_s) / (ACTIVATION_NUMBER_BYTES * work.activation_numbers),
        "elementwise_overhead_s": 0.0,
        "step_base_s": float(base_s),
        "step_per_sequence_s": float(sequence_s),
        "eager": None,
        "all_reduce_link": "",
        "all_reduce_uses_link_bandwidth": False,
        "all_reduce_ranks": [],
        "all_reduce_alpha_s": [],
        "all_reduce_beta_s_per_byte": [],
        "all_reduce_eager_alpha_s": [],
        "cross_node_all_reduce": [],
        "borrowed": {},
        "provenance": {"gemm": f"python -m runtime calibrate; {len(rows)} sizes; MLP of {measurement.model.name}, rank {rank}"},
        "held_out_error": {},
    }
    return RankFit(peak_flop, peak_bytes, profile)


def _host_and_head(row: StepRow, work: Work, flop_per_s: float, bytes_per_s: float) -> float:
    """Seconds of a step that are neither attention, MLP nor communication; what the output head takes beyond its roofline is among them."""
    roof_s = max(work.head_flop * row.sequences / flop_per_s, work.head_bytes / bytes_per_s)
    return row.step_s - row.attention_s - row.mlp_s - row.communication_s - roof_s


def _medians(sizes: Sequence[int], times_s: Sequence[float]) -> tuple[FloatArray, FloatArray]:
    """One time per distinct size, ascending."""
    known = np.array(sorted(set(sizes)), dtype=np.float64)
    medians = [float(np.median([time_s for size, time_s in zip(sizes, times_s, strict=True) if size == wanted])) for wanted in known]
    return known, np.array(medians)


def _efficiencies(tokens: FloatArray, times_s: FloatArray, flop_s: float, bytes_s: float) -> tuple[float, float]:
    """(compute, memory) efficiency that best explain the times in log error; flop_s per token and bytes_s at the peaks."""
    compute, memory = np.meshgrid(EFFICIENCIES, EFFICIENCIES, indexing="ij")
    roof = np.maximum(flop_s * tokens / compute[..., None], bytes_s / memory[..., None])
    error = np.abs(np.log(roof / times_s)).sum(axis=-1)
    best = np.unravel_index(int(error.argmin()), error.shape)
    return float(compute[best]), float(memory[best])


def _efficiency(amount: float, peak: float, seconds_each: float) -> float:
    """Fraction of the peak at which `amount` takes `seconds_each`; the largest allowed where nothing was left to measure."""
    if seconds_each <= amount / (peak * EFFICIENCY_MAX):
        return EFFICIENCY_MAX
    return max(amount / (peak * float(seconds_each)), 1e-4)


def non_negative_least_squares(columns: FloatArray, wanted: FloatArray) -> FloatArray:
    """Coefficients >= 0 of the least squared error, shape (columns,): the unconstrained ones, dropping the most negative until none is.

    Not always the exact optimum (Lawson and Hanson's is), but with the few, unlike columns here the two agree.
    """
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
    active = list(range(columns.shape[1]))
    while active:
        found = np.linalg.lstsq(columns[:, active] / scale[active], wanted, rcond=None)[0]
        if found.min() >= 0:
            solution = np.zeros(columns.shape[1])
            solution[active] = found / scale[active]
            return solution
        del active[int(found.argmin())]
    return np.zeros(columns.shape[1])


def fit_link(reduces: Sequence[ReduceRow], number_bytes: float) -> LinkFit | None:
    """The link over which a ring (2 (n - 1) messages of 1/n of the bytes) takes what was measured; None for one rank.

    number_bytes: of the numbers really sent; the simulator counts 2-byte ones, so each of its bytes stands for number_bytes / 2.
    """
    if not reduces or reduces[0].ranks < 2:
        return None
    ranks = reduces[0].ranks
    times_s = np.array([row.time_s_p50 for row in reduces])
    columns = np.array([[1.0, row.size_bytes] for row in reduces])
    alpha_s, beta = non_negative_least_squares(columns / times_s[:, None], np.ones(len(reduces)))  # relative errors
    steps = 2.0 * (ranks - 1)
    beta_s_per_byte = beta * number_bytes / ACTIVATION_NUMBER_BYTES * ranks / steps
    return LinkFit(float(alpha_s) / steps, max(float(beta_s_per_byte), BETA_MIN))


# --- what the simulator makes of it -----------------------------------------------------------------------------------------


def predicted_step_s(group: TpGroup, plan: SplitPlan, row: StepRow) -> float:
    """Seconds of a step of that size by the simulated world's own formula, residual tables included."""
    ranks = len(group.ranks)
    reduce = affine_coefficients(group)
    rank_cost = np.zeros((1, 2, ranks, ST.RANK_COLUMNS))
    rank_cost[0, :] = rank_cost_rows(group, plan, with_residuals=True)
    group_cost = group_cost_row(group, reduce.alpha_s, reduce.beta_s_per_byte)[None]
    residual, slow = residual_rows(group)[None], np.ones((1, ranks, 2))
    is_decode = row.kind == "decode"
    kv, decoding = (float(row.kv_tokens), row.sequences) if is_decode else (0.0, 0)
    parts = ST.step_parts(0, rank_cost, group_cost, residual, slow, row.tokens, 0, row.pairs, 0.0, kv, 0.0, decoding, 0, row.sequences)
    return float(sum(parts[:4]))


def score(predicted_s: FloatArray, measured_s: FloatArray) -> dict[str, float]:
    """Mean, median and 90th percentile of the absolute relative error, and the row count: as the shipped profiles state theirs."""
    error = np.abs(predicted_s / measured_s - 1.0)
    return {
        "mean": float(error.mean()),
        "median": float(np.median(error)),
        "p90": float(np.quantile(error, 0.9)),
        "rows": float(len(error)),
    }
