"""What a step under a split plan is expected to cost: the forecast of the step, and an analytic roofline per rank and stage.

A planner's belief, analytic on purpose and fed with measured rank speeds where they exist; which plan to run is decided in
`envs.decision.split_planner`, and what a step really takes is the simulator's or the ranks' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from envs.decision import split_search
from envs.domain.plans import SplitPlan, TpGroup
from envs.domain.specs import ModelSpec
from envs.perf_model import memory_fit
from envs.perf_model.all_reduce import ring_factors
from envs.perf_model.memory_fit import (
    ACTIVATION_NUMBER_BYTES,
    DEFAULT_ROOM,
    NO_OVERLAP,
    FloatArray,
    IntArray,
    Overlap,
    StepRoom,
)

VOCABULARY_UNITS_MAX = 512


@dataclass(frozen=True, slots=True)
class StepMix:
    """What a step looks like: sequences decoded, KV tokens they read, and prompt tokens where the step also prefills.

    prefill_share: fraction of steps that prefill. prefill_context_tokens: mean tokens a prompt token attends to.
    """

    decode_sequences: float
    kv_tokens: float
    prefill_tokens: float = 0.0
    prefill_share: float = 0.0
    prefill_context_tokens: float = 0.0

    def __post_init__(self) -> None:
        values = (self.decode_sequences, self.kv_tokens, self.prefill_tokens, self.prefill_share, self.prefill_context_tokens)
        if not all(np.isfinite(value) and value >= 0 for value in values) or self.prefill_share > 1:
            raise ValueError(f"{self}: all values must be finite and >= 0, and prefill_share at most 1")

    @property
    def kinds(self) -> tuple[tuple[float, float], ...]:
        """Kinds of step as (share of steps, prompt tokens); one or two, shares add up to 1."""
        if self.prefill_share == 0 or self.prefill_tokens == 0:
            return ((1.0, 0.0),)
        if self.prefill_share == 1:
            return ((1.0, self.prefill_tokens),)
        return ((1.0 - self.prefill_share, 0.0), (self.prefill_share, self.prefill_tokens))


class MixForecast:
    """Exponential moving average of observed steps: the forecast of the next minutes' step.

    Each observation is one stretch of `span_s` seconds; the past weighs half after `half_life_s`. Before the first one the
    prior stands, so nothing divides by nothing.
    """

    def __init__(self, half_life_s: float = 60.0, prior: StepMix | None = None) -> None:
        if half_life_s <= 0:
            raise ValueError(f"half_life_s={half_life_s} must be positive")
        self._half_life_s = half_life_s
        self._prior = StepMix(32.0, 32.0 * 1024, 512.0, 0.2, 512.0) if prior is None else prior
        self._average: FloatArray | None = None
        self._weight = 0.0

    def observe(self, mix: StepMix, span_s: float) -> None:
        """Add a stretch of `span_s` seconds in which steps looked like `mix` on average. Raises: ValueError if span_s < 0."""
        if span_s < 0:
            raise ValueError(f"span_s={span_s} must be >= 0")
        # Prompt tokens count only in steps that prefill, so their averages are taken per step and divided back in `mix`.
        prefill = mix.prefill_tokens * mix.prefill_share
        row = np.array([mix.decode_sequences, mix.kv_tokens, mix.prefill_share, prefill, prefill * mix.prefill_context_tokens])
        gain = 1.0 - 0.5 ** (span_s / self._half_life_s)
        self._weight += gain * (1.0 - self._weight)
        if self._average is None:
            self._average = row
        elif self._weight > 0:
            # Divided by the weight seen so far: early observations are not diluted by an empty past (as in Adam's correction).
            self._average = self._average + (gain / self._weight) * (row - self._average)

    @property
    def mix(self) -> StepMix:
        if self._average is None:
            return self._prior
        sequences, kv_tokens, share, tokens, context = (float(value) for value in self._average)
        if share <= 0 or tokens <= 0:
            return StepMix(sequences, kv_tokens)
        return StepMix(sequences, kv_tokens, tokens / share, min(share, 1.0), context / tokens)


@dataclass(frozen=True, slots=True, eq=False)
class RankSpeed:
    """Rates that a rank's kernels reach, shape (ranks,) each: measured, or datasheet times efficiency. Zero: the rank is lost."""

    flop_per_s: FloatArray
    bytes_per_s: FloatArray

    def __post_init__(self) -> None:
        if self.flop_per_s.ndim != 1 or self.flop_per_s.shape != self.bytes_per_s.shape:
            raise ValueError(f"RankSpeed: shapes {self.flop_per_s.shape} and {self.bytes_per_s.shape}; give two arrays of shape (ranks,)")
        both = np.concatenate([self.flop_per_s, self.bytes_per_s])
        if not np.isfinite(both).all() or (both < 0).any():
            raise ValueError(f"RankSpeed: rates {both.tolist()} must be finite and >= 0")

    @classmethod
    def from_datasheet(
        cls,
        group: TpGroup,
        compute_efficiency: float | Sequence[float] | FloatArray = 0.68,
        bandwidth_efficiency: float | Sequence[float] | FloatArray = 0.80,
    ) -> RankSpeed:
        """Datasheet peaks times efficiencies (one, or one per rank). Defaults: middle of fits to published A100, H100, A40,
        L40S kernel tables (compute .59-.76, memory .72-.96)."""
        peak_flop_per_s = np.array([place.gpu.flop_per_s for place in group.ranks])
        peak_bytes_per_s = np.array([place.gpu.memory_bytes_per_s for place in group.ranks])
        return cls(peak_flop_per_s * np.asarray(compute_efficiency), peak_bytes_per_s * np.asarray(bandwidth_efficiency))

    def scaled(self, factors: FloatArray | Sequence[float] | None) -> RankSpeed:
        """Speeds times relative factors, shape (ranks,): 0.5 is a rank throttled to half, 0 a lost one."""
        if factors is None:
            return self
        scale = np.asarray(factors, dtype=np.float64)
        return RankSpeed(self.flop_per_s * scale, self.bytes_per_s * scale)


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """What a plan is judged under. Links default to the group's slowest between its ranks.

    comm_hidden_fraction: part of the shorter of compute and communication that runs behind the longer (1: max of the two).
    kv_tokens: KV that must fit; None takes the mix's (decode KV and one step's prompt). mlp_block: columns per block.
    """

    comm_alpha_s: float | None = None
    comm_beta_s_per_byte: float | None = None
    comm_hidden_fraction: float = 1.0
    memory_fraction: float = 0.9
    kv_tokens: float | None = None
    mlp_block: int | None = None
    overlap: Overlap = field(default=NO_OVERLAP)
    room: StepRoom = field(default=DEFAULT_ROOM)

    def link(self, group: TpGroup) -> tuple[float, float]:
        link = group.outer_link if len(group.domains) > 1 else group.inner_link
        alpha_s = link.alpha_s if self.comm_alpha_s is None else self.comm_alpha_s
        return alpha_s, link.beta_s_per_byte if self.comm_beta_s_per_byte is None else self.comm_beta_s_per_byte

    def kv_need(self, mix: StepMix) -> float:
        return mix.kv_tokens + mix.prefill_tokens if self.kv_tokens is None else self.kv_tokens


DEFAULT_TERMS = PlanTerms()


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One kernel of a stage, summed over layers: FLOP and bytes per unit and per run held; shapes (kinds,)."""

    flop_per_unit: FloatArray
    flop_per_run: FloatArray
    bytes_per_unit: FloatArray
    bytes_per_run: FloatArray

    def time_s(self, units: IntArray, runs: IntArray, speed: RankSpeed) -> FloatArray:
        """Roofline time, shape (kinds,) + units.shape, whose first axis is the ranks'."""
        ranks = (slice(None),) + (None,) * (units.ndim - 1)
        kinds = (slice(None),) + (None,) * units.ndim
        flop = self.flop_per_unit[kinds] * units + self.flop_per_run[kinds] * runs
        moved = self.bytes_per_unit[kinds] * units + self.bytes_per_run[kinds] * runs
        # A lost rank (speed 0) takes forever over any work and no time over none, hence the masked division.
        flop_s = np.where(flop > 0, np.inf, 0.0)
        moved_s = np.where(moved > 0, np.inf, 0.0)
        np.divide(flop, speed.flop_per_s[ranks], out=flop_s, where=(speed.flop_per_s > 0)[ranks])
        np.divide(moved, speed.bytes_per_s[ranks], out=moved_s, where=(speed.bytes_per_s > 0)[ranks])
        return np.maximum(flop_s, moved_s)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Work between two all-reduces, over all layers; each is as slow as its own slowest rank. comm_s: shape (kinds,)."""

    units: int
    per_run: int
    operations: tuple[Operation, ...]
    comm_s: FloatArray

    def rank_times_s(self, units: IntArray, runs: IntArray, speed: RankSpeed) -> FloatArray:
        total = self.operations[0].time_s(units, runs, speed)
        for operation in self.operations[1:]:
            total = total + operation.time_s(units, runs, speed)
        return total

    def table(self, speed: RankSpeed) -> FloatArray:
        """Times for every width, shape (kinds, ranks, units + 1, 2), as `envs.decision.split_search` wants them."""
        widths = np.arange(self.units + 1)
        fewest = -(-widths // self.per_run)
        runs = np.stack([fewest, fewest + 1], axis=1)
        shape = (speed.flop_per_s.shape[0], self.units + 1, 2)
        held = np.broadcast_to(widths[None, :, None], shape)
        return np.ascontiguousarray(self.rank_times_s(held, np.broadcast_to(runs, shape), speed))


@dataclass(frozen=True, slots=True, eq=False)
class SplitProblem:
    """One planning problem in arrays: the three stages, their unit sizes, and each rank's memory."""

    group: TpGroup
    speed: RankSpeed
    kind_weight: FloatArray
    stages: tuple[Stage, Stage, Stage]
    mlp_block: int
    row_block: int
    hidden_fraction: float
    unit_bytes: FloatArray  # per query head, KV head, MLP block, row block
    free_bytes: FloatArray  # usable memory less what every rank holds whatever its widths, shape (ranks,)
    terms: PlanTerms
    kv_tokens: float

    def stage_s(self, stage: int, times_s: FloatArray) -> float:
        """Cost of a stage from its ranks' times, shape (kinds, ranks)."""
        return float(split_search.stage_cost_s(times_s.max(axis=1), self.kind_weight, self.stages[stage].comm_s, self.hidden_fraction))


def _constant(value: float, kinds: int) -> FloatArray:
    return np.full(kinds, value)


def _attention_stage(model: ModelSpec, mix: StepMix, tokens: FloatArray, prefill: FloatArray, comm_s: FloatArray) -> Stage:
    """Projections, decode attention and prefill attention: three kernels, each with its own roofline."""
    kinds, zero = tokens.shape[0], np.zeros(tokens.shape[0])
    head_numbers = 2.0 * model.layers * model.hidden * model.head_dim
    kv_bytes = memory_fit.kv_bytes_per_token_per_head(model)
    context = max(mix.prefill_context_tokens, mix.prefill_tokens / 2.0)
    attended = 4.0 * model.layers * model.head_dim
    weight = _constant(head_numbers * model.weight_number_bytes, kinds)
    projections = Operation(2.0 * tokens * head_numbers, 2.0 * tokens * head_numbers, weight, weight)
    decode = Operation(_constant(attended * mix.kv_tokens, kinds), zero, zero, _constant(kv_bytes * mix.kv_tokens, kinds))
    prompt = Operation(attended * prefill * context, zero, zero, np.where(prefill > 0, kv_bytes * context, 0.0))
    return Stage(model.query_heads, model.query_heads // model.kv_heads, (projections, decode, prompt), comm_s)


def _mlp_stage(model: ModelSpec, block: int, tokens: FloatArray, comm_s: FloatArray) -> Stage:
    """Gate, up and down. With experts a step reads those that any token chose: E (1 - (1 - a/E)^tokens) of E, evenly routed."""
    column = 3.0 * model.layers * model.hidden * block
    touched, active = np.ones_like(tokens), 1
    if model.experts:
        active = max(1, model.experts_active)
        touched = model.experts * (1.0 - (1.0 - active / model.experts) ** tokens)
    zero = np.zeros_like(tokens)
    operation = Operation(2.0 * tokens * column * active, zero, touched * column * model.weight_number_bytes, zero)
    return Stage(model.mlp_width // block, 1, (operation,), comm_s)


def _vocabulary_stage(model: ModelSpec, block: int, sampled: FloatArray, comm_s: FloatArray) -> Stage:
    """The output head over the sampled positions; the embedding's look-up is free beside it, its all-reduce is not."""
    zero = np.zeros_like(sampled)
    row_bytes = _constant(float(model.hidden * block) * model.weight_number_bytes, sampled.shape[0])
    operation = Operation(2.0 * sampled * model.hidden * block, zero, row_bytes, zero)
    return Stage(-(-model.vocabulary // block), 1, (operation,), comm_s)


def split_problem(group: TpGroup, mix: StepMix, speed: RankSpeed | None, factors: FloatArray | None, terms: PlanTerms) -> SplitProblem:
    """Tables' ingredients and memory of one planning problem. Raises: ValueError for a wrong rank count or MLP block."""
    model, ranks = group.model, len(group.ranks)
    speed = (RankSpeed.from_datasheet(group) if speed is None else speed).scaled(factors)
    if speed.flop_per_s.shape[0] != ranks:
        given = speed.flop_per_s.shape[0]
        raise ValueError(f"rank speeds for {given} ranks, group {group.name!r} has {ranks}; give one per rank")
    prefill = np.array([tokens for _, tokens in mix.kinds])
    tokens = mix.decode_sequences + prefill
    steps, moved = ring_factors(ranks)
    alpha_s, beta_s_per_byte = terms.link(group)
    comm_s = steps * alpha_s + moved * tokens * model.hidden * ACTIVATION_NUMBER_BYTES * beta_s_per_byte
    block = memory_fit.default_mlp_block(model) if terms.mlp_block is None else terms.mlp_block
    if block < 1 or model.mlp_width % block:
        raise ValueError(f"mlp_block={block} does not divide mlp_width={model.mlp_width} of {model.name!r}; give a divisor")
    row_block = -(-model.vocabulary // VOCABULARY_UNITS_MAX)
    # A prefill step samples one more position: the prompt that ends in it.
    sampled = mix.decode_sequences + np.where(prefill > 0, 1.0, 0.0)
    stages = (
        _attention_stage(model, mix, tokens, prefill, model.layers * comm_s),
        _mlp_stage(model, block, tokens, model.layers * comm_s),
        _vocabulary_stage(model, row_block, sampled, comm_s),
    )
    kv_tokens = terms.kv_need(mix)
    units = memory_fit.total_unit_bytes(model, kv_tokens, terms.room)
    per_unit = np.array([units.per_query_head, units.per_kv_head, units.per_mlp_column * block, units.per_vocabulary_row * row_block])
    free = memory_fit.usable_bytes(group, terms.memory_fraction) - units.constant - _overlap_bytes(group, terms, block)
    weight = np.array([share for share, _ in mix.kinds])
    return SplitProblem(group, speed, weight, stages, block, row_block, terms.comm_hidden_fraction, per_unit, free, terms, kv_tokens)


def _overlap_bytes(group: TpGroup, terms: PlanTerms, block: int) -> FloatArray:
    """Most bytes the overlap adds per rank, shape (ranks,): its inner sides in full. A bound: a plan may hold less."""
    model, overlap = group.model, terms.overlap
    units = memory_fit.total_unit_bytes(model, 0.0, terms.room)
    kv_heads = -(-overlap.query_heads * model.kv_heads // model.query_heads)
    per_side = (
        overlap.query_heads * units.per_query_head
        + kv_heads * units.per_kv_head
        + overlap.mlp_blocks * block * units.per_mlp_column
        + overlap.vocabulary_rows * units.per_vocabulary_row
    )
    sides = np.full(len(group.ranks), 2.0)
    sides[0] -= 1.0
    sides[-1] -= 1.0
    return np.asarray(sides * per_side, dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class RankTimes:
    """Busy seconds per rank in each stage, expected over the mix, shape (ranks,) each, and the step's communication."""

    attention_s: FloatArray
    mlp_s: FloatArray
    vocabulary_s: FloatArray
    communication_s: float


def stage_times_s(problem: SplitProblem, plan: SplitPlan) -> list[FloatArray]:
    """Times of the three stages, shape (kinds, ranks) each."""
    model = problem.group.model
    plan.check_covers(model)
    heads = memory_fit.unit_ranges(plan.query_heads)
    kv_heads = np.diff(memory_fit.kv_head_ranges(model, heads), axis=1)[:, 0]
    columns = np.array(plan.mlp_blocks) * plan.mlp_block / problem.mlp_block
    rows = np.array(plan.vocabulary_rows) / problem.row_block
    held = (np.array(plan.query_heads), kv_heads), (columns, columns), (rows, rows)
    return [stage.rank_times_s(units, runs, problem.speed) for stage, (units, runs) in zip(problem.stages, held, strict=True)]


def _priced(
    group: TpGroup, plan: SplitPlan, mix: StepMix, factors: FloatArray | None, speed: RankSpeed | None, terms: PlanTerms
) -> tuple[SplitProblem, list[FloatArray]]:
    """The planning problem and each stage's times under `plan`. Raises: ValueError when plan and group differ in ranks."""
    if plan.ranks != len(group.ranks):
        raise ValueError(f"plan has {plan.ranks} ranks, group {group.name!r} has {len(group.ranks)}; plan for this group")
    problem = split_problem(group, mix, speed, factors, terms)
    return problem, stage_times_s(problem, plan)


def rank_times(
    group: TpGroup,
    plan: SplitPlan,
    mix: StepMix,
    speed_factors: FloatArray | None = None,
    *,
    speed: RankSpeed | None = None,
    terms: PlanTerms = DEFAULT_TERMS,
) -> RankTimes:
    """Seconds each rank is busy per stage of an expected step, and the step's all-reduce seconds, hidden or not."""
    problem, stages = _priced(group, plan, mix, speed_factors, speed, terms)
    busy = [problem.kind_weight @ times for times in stages]
    communication = sum(float(problem.kind_weight @ stage.comm_s) for stage in problem.stages)
    return RankTimes(busy[0], busy[1], busy[2], communication)


def step_cost_s(
    group: TpGroup,
    plan: SplitPlan,
    mix: StepMix,
    speed_factors: FloatArray | None = None,
    *,
    speed: RankSpeed | None = None,
    terms: PlanTerms = DEFAULT_TERMS,
) -> float:
    """Expected seconds of one step under `plan`.

    Per kind of step: attention, MLP and vocabulary stage each take their own slowest rank, overlapped with the stage's
    all-reduce. A rank with zero width still takes part in the all-reduces; leaving it out is a smaller group. Infinite when a
    lost rank has work. Raises: ValueError when plan, speeds and group differ in ranks or the plan does not cover the model.
    Source: roofline bound, Williams et al., CACM 52(4), 2009, per kernel.
    """
    problem, stages = _priced(group, plan, mix, speed_factors, speed, terms)
    return sum(problem.stage_s(index, times) for index, times in enumerate(stages))


def deviation(rank_times_s: FloatArray) -> float:
    """1 - mean / max of the ranks' times at one barrier: 0 balanced, towards 1 when one rank is waited for; 0 if all idle."""
    slowest = float(rank_times_s.max())
    return 0.0 if slowest <= 0 else 1.0 - float(rank_times_s.mean()) / slowest
