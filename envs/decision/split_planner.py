"""Which split a group should run: the named corners, the exact best plan on a forecast, and what changing the plan costs.

Bytes come from `envs.perf_model.memory_fit`, seconds from `split_cost`, the search on tables is `split_search`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement
from math import comb

import numpy as np

from envs.decision import split_search
from envs.decision.split_cost import (
    DEFAULT_TERMS,
    MixForecast,
    PlanTerms,
    RankSpeed,
    RankTimes,
    SplitProblem,
    StepMix,
    deviation,
    rank_times,
    split_problem,
    step_cost_s,
)
from envs.domain.plans import SplitPlan, TpGroup
from envs.domain.specs import ModelSpec
from envs.domain.suggestions import unknown_name
from envs.perf_model import memory_fit
from envs.perf_model.memory_fit import NO_OVERLAP, FloatArray, InfeasibleSplit, IntArray, Overlap, StepRoom

__all__ = [
    "CORNERS",
    "InfeasibleSplit",
    "MixForecast",
    "Overlap",
    "PlanTerms",
    "RankSpeed",
    "RankTimes",
    "ResplitPrice",
    "StepMix",
    "StepRoom",
    "corner_plan",
    "deviation",
    "plan",
    "possible_degrees",
    "rank_times",
    "ranks_worth_using",
    "resplit_price",
    "step_cost_s",
]

CORNERS: tuple[str, ...] = ("even", "compute", "bandwidth", "memory", "planner")
"""Named plans; the index is the `argument` of a SET_SPLIT command."""

ENUMERATED_CUTS_MAX = 3000
POLISH_ROUNDS_MAX = 8

Widths = tuple[IntArray, IntArray, IntArray]
"""Query heads, MLP blocks and vocabulary row blocks per rank, shape (ranks,) each."""


def possible_degrees(model: ModelSpec, even_only: bool = False) -> tuple[int, ...]:
    """Tensor-parallel degrees at which every rank can hold a query head; `even_only`: those that divide every cut."""
    degrees = range(1, model.query_heads + 1)
    if not even_only:
        return tuple(degrees)
    cuts = (model.query_heads, model.kv_heads, model.mlp_width, model.vocabulary)
    return tuple(degree for degree in degrees if not any(cut % degree for cut in cuts))


def _check_degree(group: TpGroup) -> None:
    degrees = possible_degrees(group.model)
    if len(group.ranks) not in degrees:
        raise InfeasibleSplit(
            f"group {group.name!r} has {len(group.ranks)} ranks, but {group.model.name!r} has {group.model.query_heads} "
            f"query heads; possible degrees: {', '.join(str(degree) for degree in degrees)}"
        )


def corner_plan(
    group: TpGroup,
    corner: str,
    mix: StepMix,
    speed_factors: FloatArray | None = None,
    *,
    speed: RankSpeed | None = None,
    terms: PlanTerms = DEFAULT_TERMS,
    version: int = 0,
) -> SplitPlan:
    """The plan named `corner`: all cuts in proportion to ranks (even), FLOP/s, bytes/s or memory, or the planner's.

    Where a rank's share exceeds its memory the rest goes to the others in the same proportions; what rounding to whole heads
    still leaves over is met by leaning towards the memory-proportional plan, at last by any plan that fits.
    Raises: ValueError for an unknown corner, InfeasibleSplit when no plan fits.
    """
    if corner not in CORNERS:
        raise ValueError(unknown_name("split corner", corner, CORNERS))
    if corner == "planner":
        return plan(group, mix, speed_factors, speed=speed, terms=terms, version=version)
    _check_degree(group)
    problem = split_problem(group, mix, speed, speed_factors, terms)
    is_alive = (problem.speed.flop_per_s > 0) & (problem.speed.bytes_per_s > 0)
    wanted = {
        "even": np.ones(len(group.ranks)),
        "compute": problem.speed.flop_per_s,
        "bandwidth": problem.speed.bytes_per_s,
        "memory": np.array([float(place.gpu.memory_bytes) for place in group.ranks]),
    }[corner] * is_alive
    room = memory_fit.fill_shares(group, problem.kv_tokens, terms.memory_fraction, terms.room) * is_alive
    if wanted.sum() > 0 and room.sum() > 0:
        shares = _pour(wanted / wanted.sum(), room)
        for lean in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
            mixed = (1.0 - lean) * shares + lean * room / room.sum()
            candidate = memory_fit.proportional_plan(group.model, mixed, problem.mlp_block, version)
            if memory_fit.fits(group, candidate, int(np.ceil(problem.kv_tokens)), terms.memory_fraction, terms.overlap, terms.room):
                return candidate
    return _to_plan(problem, _best_widths(problem), version)


def _pour(shares: FloatArray, room: FloatArray) -> FloatArray:
    """Shares limited to `room`, the excess poured over the others in their proportions; sums to 1 where room allows."""
    poured = np.minimum(shares, room)
    for _ in range(shares.shape[0]):
        is_open = (poured < room) & (shares > 0)
        excess = 1.0 - poured.sum()
        if excess <= 1e-12 or not is_open.any():
            break
        poured = np.where(is_open, np.minimum(room, poured + excess * shares / shares[is_open].sum()), poured)
    return poured


def plan(
    group: TpGroup,
    mix: StepMix,
    speed_factors: FloatArray | None = None,
    current: SplitPlan | None = None,
    price_s: float = 0.0,
    hysteresis: float = 0.02,
    horizon_s: float = 60.0,
    *,
    speed: RankSpeed | None = None,
    terms: PlanTerms = DEFAULT_TERMS,
    version: int = 0,
) -> SplitPlan:
    """The plan with the least `step_cost_s` on the forecast, or `current` while leaving it does not pay.

    Each stage ends in its own all-reduce, so the cuts are optimal one by one while memory lets them; where it binds, heads and
    MLP blocks are searched jointly. Zero widths are allowed. The vocabulary cut is exact in blocks of 1/512 of its rows and,
    where memory binds, chosen from three ways of placing it. With both kinds of step in the mix, binding memory and too many
    head cuts to enumerate, the joint search bounds the mean over kinds and is then improved cut by cut (a local optimum).

    current, price_s, hysteresis: a change must save more than `hysteresis` (a fraction of step time, against flapping on a
    noisy forecast) plus `price_s` / `horizon_s` (its one-off seconds over the time the forecast is trusted for).
    Raises: InfeasibleSplit, with bytes needed and offered when nothing fits, with the possible degrees for too many ranks.
    """
    _check_degree(group)
    problem = split_problem(group, mix, speed, speed_factors, terms)
    best = _to_plan(problem, _best_widths(problem), version if current is None else current.version + 1)
    if current is None or current.ranks != best.ranks:
        return best
    if _cuts(current) == _cuts(best):
        return current
    tokens = int(np.ceil(problem.kv_tokens))
    if not memory_fit.fits(group, current, tokens, terms.memory_fraction, terms.overlap, terms.room):
        return best
    now_s = step_cost_s(group, current, mix, speed_factors, speed=speed, terms=terms)
    new_s = step_cost_s(group, best, mix, speed_factors, speed=speed, terms=terms)
    if not np.isfinite(now_s):
        return best
    saved = 1.0 - new_s / now_s if now_s > 0 else 0.0
    return best if saved > hysteresis + price_s / horizon_s else current


def _cuts(split: SplitPlan) -> tuple[tuple[int, ...], ...]:
    columns = tuple(blocks * split.mlp_block for blocks in split.mlp_blocks)
    return split.query_heads, columns, split.vocabulary_rows


def _to_plan(problem: SplitProblem, widths: Widths, version: int) -> SplitPlan:
    rows = widths[2] * problem.row_block
    last = int(np.flatnonzero(rows)[-1])
    rows[last] -= rows.sum() - problem.group.model.vocabulary
    heads, blocks, vocabulary = (tuple(int(width) for width in part) for part in (widths[0], widths[1], rows))
    return SplitPlan(heads, blocks, vocabulary, mlp_block=problem.mlp_block, version=version)


# --- search -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """A problem with its cost tables and, per stage, the sorted finite times of the first and the last kind."""

    problem: SplitProblem
    tables: tuple[FloatArray, ...]
    values: tuple[tuple[FloatArray, FloatArray], ...]

    def cost_s(self, widths: Widths) -> float:
        return sum(self.stage_s(stage, widths[stage]) for stage in range(3))

    def stage_s(self, stage: int, widths: IntArray) -> float:
        extra = _runs(widths[None], self.problem.stages[stage].per_run)[0] - -(-widths // self.problem.stages[stage].per_run)
        ranks = np.arange(widths.shape[0])
        return self.problem.stage_s(stage, self.tables[stage][:, ranks, widths, extra])

    def best(self, stage: int, free_bytes: FloatArray) -> IntArray | None:
        """Optimal widths of one stage when it may use `free_bytes`, shape (ranks,); None where nothing fits."""
        problem, table = self.problem, self.tables[stage]
        per_run = problem.stages[stage].per_run
        caps = np.full(free_bytes.shape[0], table.shape[2] - 1, dtype=np.int64)
        if stage == 0:
            table = np.where(_attention_bytes(problem, table.shape[2]) <= free_bytes[:, None, None], table, np.inf)
        else:
            unit_bytes = problem.unit_bytes[stage + 1]
            caps = np.clip(np.floor(free_bytes / unit_bytes), 0, caps).astype(np.int64)
        weight, comm_s, hidden = problem.kind_weight, problem.stages[stage].comm_s, problem.hidden_fraction
        first, last = self.values[stage]
        limits = split_search.best_limits(table, first, last, per_run, caps, weight, comm_s, hidden)
        if not np.isfinite(limits[0]):
            return None
        widths: IntArray = split_search.cut_within(table, per_run, caps, limits)
        return widths


def _attention_bytes(problem: SplitProblem, widths: int) -> FloatArray:
    """Bytes of `width` query heads on the fewest KV heads, or one more; shape (1, widths, 2)."""
    heads = np.arange(widths)
    runs = -(-heads // problem.stages[0].per_run)
    fewest = heads * problem.unit_bytes[0] + runs * problem.unit_bytes[1]
    return np.asarray(np.stack([fewest, fewest + problem.unit_bytes[1]], axis=1)[None], dtype=np.float64)


def _runs(widths: IntArray, per_run: int) -> IntArray:
    """Runs (KV heads) touched per rank by contiguous ranges of these widths, shape (..., ranks)."""
    ends = np.cumsum(widths, axis=-1)
    starts = ends - widths
    touched = -(-ends // per_run) - starts // per_run
    return np.asarray(np.where(widths > 0, touched, 0), dtype=np.int64)


def _stage_bytes(problem: SplitProblem, stage: int, widths: IntArray) -> FloatArray:
    """Bytes per rank of one stage's widths, shape of `widths`."""
    if stage > 0:
        return np.asarray(widths * problem.unit_bytes[stage + 1], dtype=np.float64)
    runs = _runs(widths, problem.stages[0].per_run)
    return np.asarray(widths * problem.unit_bytes[0] + runs * problem.unit_bytes[1], dtype=np.float64)


def _best_widths(problem: SplitProblem) -> Widths:
    tables = tuple(stage.table(problem.speed) for stage in problem.stages)
    search = _Search(problem, tables, tuple((_finite_values(table[0]), _finite_values(table[-1])) for table in tables))
    alone = [search.best(stage, problem.free_bytes) for stage in range(3)]
    if any(widths is None for widths in alone):
        raise _infeasible(problem)
    heads, blocks, rows = (widths for widths in alone if widths is not None)
    used = sum(_stage_bytes(problem, stage, widths) for stage, widths in enumerate((heads, blocks, rows)))
    if (used <= problem.free_bytes).all():
        return heads, blocks, rows
    return _joint_widths(search, rows)


def _finite_values(table: FloatArray) -> FloatArray:
    values = np.sort(table, axis=None)
    return values[: np.searchsorted(values, np.inf)]


def _joint_widths(search: _Search, rows_alone: IntArray) -> Widths:
    """Best plan where the cuts compete for memory: heads x blocks jointly, for each of three placements of the vocabulary."""
    problem = search.problem
    best: Widths | None = None
    best_s = np.inf
    for rows in (None, rows_alone, _rows_by_memory(problem)):
        reserved = 0.0 if rows is None else _stage_bytes(problem, 2, rows)
        if (problem.free_bytes < reserved).any():
            continue
        pair = _best_pair(search, problem.free_bytes - reserved)
        if pair is None:
            continue
        if rows is None:  # whatever the other two leave
            rows = search.best(2, problem.free_bytes - _stage_bytes(problem, 0, pair[0]) - _stage_bytes(problem, 1, pair[1]))
            if rows is None:
                continue
        widths = _polished(search, (pair[0], pair[1], rows))
        cost_s = search.cost_s(widths)
        if cost_s < best_s:
            best, best_s = widths, cost_s
    if best is None:
        raise _infeasible(problem)
    for _ in range(POLISH_ROUNDS_MAX):  # polishing may have moved the rows: the pair must be the best beside the final ones
        pair = _best_pair(search, problem.free_bytes - _stage_bytes(problem, 2, best[2]))
        if pair is None or search.cost_s((pair[0], pair[1], best[2])) >= best_s:
            break
        best = _polished(search, (pair[0], pair[1], best[2]))
        best_s = search.cost_s(best)
    return best


def _rows_by_memory(problem: SplitProblem) -> IntArray:
    is_alive = (problem.speed.flop_per_s > 0) & (problem.speed.bytes_per_s > 0)
    room = np.maximum(problem.free_bytes, 0.0) * is_alive
    return np.array(memory_fit.apportion(problem.stages[2].units, room), dtype=np.int64)


def _polished(search: _Search, widths: Widths) -> Widths:
    """Solve each cut again exactly in the memory that the other two leave, until the cost stops falling."""
    problem, parts = search.problem, list(widths)
    cost_s = search.cost_s(widths)
    for _ in range(POLISH_ROUNDS_MAX):
        before_s = cost_s
        for stage in range(3):
            others = sum(_stage_bytes(problem, other, parts[other]) for other in range(3) if other != stage)
            again = search.best(stage, problem.free_bytes - others)
            if again is not None and search.stage_s(stage, again) < search.stage_s(stage, parts[stage]):
                parts[stage] = again
        cost_s = search.cost_s((parts[0], parts[1], parts[2]))
        if cost_s >= before_s:
            break
    return parts[0], parts[1], parts[2]


def _best_pair(search: _Search, free_bytes: FloatArray) -> tuple[IntArray, IntArray] | None:
    """Heads and blocks that together fit `free_bytes`: by enumerating the head cuts if they are few, else by limits."""
    ranks, heads = free_bytes.shape[0], search.problem.stages[0].units
    if comb(heads + ranks - 1, ranks - 1) <= ENUMERATED_CUTS_MAX:
        return _pair_by_enumeration(search, free_bytes)
    return _pair_by_limits(search, free_bytes)


def _pair_by_enumeration(search: _Search, free_bytes: FloatArray) -> tuple[IntArray, IntArray] | None:
    """Every head cut, cheapest first, each with its best MLP cut in the memory left, until no cheaper sum can come."""
    problem, ranks = search.problem, free_bytes.shape[0]
    stage, table = problem.stages[0], search.tables[0]
    cuts = np.array(list(combinations_with_replacement(range(stage.units + 1), ranks - 1)), dtype=np.int64)
    widths = np.diff(cuts, axis=1, prepend=0, append=stage.units)
    taken = _stage_bytes(problem, 0, widths)
    extra = _runs(widths, stage.per_run) - -(-widths // stage.per_run)
    slowest_s = table[:, np.arange(ranks), widths, extra].max(axis=2)
    shorter = np.minimum(slowest_s, stage.comm_s[:, None])
    cost_s = problem.kind_weight @ (np.maximum(slowest_s, stage.comm_s[:, None]) + (1.0 - problem.hidden_fraction) * shorter)
    floor = search.best(1, free_bytes)
    if floor is None:
        return None
    floor_s = search.stage_s(1, floor)
    best, best_s = None, np.inf
    possible = np.flatnonzero((taken <= free_bytes).all(axis=1) & np.isfinite(cost_s))
    for index in possible[np.lexsort((problem.kind_weight @ slowest_s[:, possible], cost_s[possible]))]:
        if cost_s[index] + floor_s >= best_s:
            break
        blocks = search.best(1, free_bytes - taken[index])
        if blocks is not None and cost_s[index] + search.stage_s(1, blocks) < best_s:
            best, best_s = (widths[index], blocks), cost_s[index] + search.stage_s(1, blocks)
    return best


def _pair_by_limits(search: _Search, free_bytes: FloatArray) -> tuple[IntArray, IntArray] | None:
    """One limit per stage on the ranks' mean time over the kinds: exact for one kind of step."""
    problem, weight = search.problem, search.problem.kind_weight
    mean = [np.ascontiguousarray(np.tensordot(weight, table, axes=1)[None]) for table in search.tables[:2]]
    unit, run, block, _ = problem.unit_bytes
    limits, heads = split_search.joint_limits(
        mean[0],
        _finite_values(mean[0]),
        problem.stages[0].per_run,
        mean[1],
        _finite_values(mean[1]),
        free_bytes,
        unit,
        run,
        block,
        float(weight @ problem.stages[0].comm_s),
        problem.hidden_fraction,
    )
    if not np.isfinite(limits).all():
        return None
    blocks = search.best(1, free_bytes - _stage_bytes(problem, 0, heads))
    return None if blocks is None else (heads, blocks)


def _infeasible(problem: SplitProblem) -> InfeasibleSplit:
    group, units = problem.group, problem.unit_bytes
    counts = np.array([group.model.query_heads, group.model.kv_heads, problem.stages[1].units, problem.stages[2].units])
    is_alive = (problem.speed.flop_per_s > 0) & (problem.speed.bytes_per_s > 0)
    return InfeasibleSplit(
        f"no split of {group.model.name!r} over group {group.name!r}: weights, workspace and {problem.kv_tokens:.0f} tokens of "
        f"KV need {float(counts @ units):.4g} bytes in whole heads and blocks, the {int(is_alive.sum())} live ranks have "
        f"{[float(f'{value:.4g}') for value in problem.free_bytes[is_alive]]} free; add memory, quantise, or hold fewer tokens"
    )


# --- changing a plan, leaving ranks out ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ResplitPrice:
    """Bytes each rank must receive, shape (ranks,), and the seconds until the slowest receiver has them."""

    weight_bytes: FloatArray
    kv_bytes: FloatArray
    transfer_s: float


def resplit_price(
    group: TpGroup,
    old: SplitPlan,
    new: SplitPlan,
    overlap: Overlap = NO_OVERLAP,
    *,
    kv_tokens: float = 0.0,
    terms: PlanTerms = DEFAULT_TERMS,
) -> ResplitPrice:
    """What going from `old` to `new` moves, when ranks hold `old` widened by `overlap` (in units of `old`).

    Inside the overlap weights are free. KV is not: `kv_tokens` is the KV of requests that move with the split; those that keep
    their old head ranges (DESIGN: a third plan forces the oldest to move) count nothing. Widening the new plan's overlap again
    happens in the background and is not priced. Raises: ValueError when a plan does not cover the model or ranks differ.
    """
    model = group.model
    if not old.ranks == new.ranks == len(group.ranks):
        raise ValueError(f"resplit of {old.ranks} to {new.ranks} ranks in a group of {len(group.ranks)}; give its own plans")
    old.check_covers(model)
    new.check_covers(model)
    units = memory_fit.weight_unit_bytes(model)
    held = memory_fit.unit_ranges(old.query_heads, overlap.query_heads)
    wanted = memory_fit.unit_ranges(new.query_heads)
    weights = _missing(held, wanted) * units.per_query_head
    weights += _missing(memory_fit.kv_head_ranges(model, held), memory_fit.kv_head_ranges(model, wanted)) * units.per_kv_head
    held_columns = memory_fit.unit_ranges(old.mlp_blocks, overlap.mlp_blocks) * old.mlp_block
    weights += _missing(held_columns, memory_fit.unit_ranges(new.mlp_blocks) * new.mlp_block) * units.per_mlp_column
    held_rows = memory_fit.unit_ranges(old.vocabulary_rows, overlap.vocabulary_rows)
    weights += _missing(held_rows, memory_fit.unit_ranges(new.vocabulary_rows)) * units.per_vocabulary_row
    old_kv = memory_fit.kv_head_ranges(model, memory_fit.unit_ranges(old.query_heads))
    kv = _missing(old_kv, memory_fit.kv_head_ranges(model, wanted)) * kv_tokens
    kv *= memory_fit.kv_bytes_per_token_per_head(model)
    alpha_s, beta_s_per_byte = terms.link(group)
    received = weights + kv
    slowest_s = float(np.where(received > 0, alpha_s + received * beta_s_per_byte, 0.0).max())
    return ResplitPrice(weights, kv, slowest_s)


def _missing(held: IntArray, wanted: IntArray) -> FloatArray:
    """Units of `wanted` outside `held` per rank; both half-open ranges of shape (ranks, 2)."""
    shared = np.minimum(held[:, 1], wanted[:, 1]) - np.maximum(held[:, 0], wanted[:, 0])
    return np.asarray(wanted[:, 1] - wanted[:, 0] - np.maximum(shared, 0), dtype=np.float64)


def ranks_worth_using(
    group: TpGroup, mix: StepMix, *, speed: RankSpeed | None = None, terms: PlanTerms = DEFAULT_TERMS
) -> tuple[tuple[int, ...], SplitPlan, float]:
    """Rank indices, plan and step seconds of the fastest subset: TP over fewer ranks wins where links are slow.

    All-reduce time grows with the ranks while a weak rank adds little; a subset inside one node also sheds the outer link.
    Ties go to fewer ranks. One of each set of equal ranks is tried, so unlike groups of up to 8 take up to 255 plans.
    Raises: InfeasibleSplit when no subset holds the model.
    """
    speed = RankSpeed.from_datasheet(group) if speed is None else speed
    best: tuple[tuple[int, ...], SplitPlan, float] | None = None
    for subset in _unlike_subsets(group, speed):
        members = list(subset)
        part = replace(group, ranks=tuple(group.ranks[index] for index in subset))
        part_speed = RankSpeed(speed.flop_per_s[members], speed.bytes_per_s[members])
        try:
            split = plan(part, mix, speed=part_speed, terms=terms)
        except InfeasibleSplit:
            continue
        cost_s = step_cost_s(part, split, mix, speed=part_speed, terms=terms)
        if best is None or cost_s < best[2]:
            best = subset, split, cost_s
    if best is None:
        raise _infeasible(split_problem(group, mix, speed, None, terms))
    return best


def _unlike_subsets(group: TpGroup, speed: RankSpeed) -> Iterator[tuple[int, ...]]:
    """Subsets of ranks by size, one of each multiset of (GPU, node, speed)."""
    kinds: Sequence[tuple[object, ...]] = [
        (place.gpu.name, place.gpu.memory_bytes, place.rack, place.node, float(flop), float(moved))
        for place, flop, moved in zip(group.ranks, speed.flop_per_s, speed.bytes_per_s, strict=True)
    ]
    for size in range(1, min(len(kinds), group.model.query_heads) + 1):
        seen: set[tuple[tuple[object, ...], ...]] = set()
        for subset in combinations(range(len(kinds)), size):
            key = tuple(sorted((kinds[index] for index in subset), key=repr))
            if key not in seen:
                seen.add(key)
                yield subset
