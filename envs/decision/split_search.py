"""Exact search for the cut whose slowest rank is fastest, on cost tables. Compiled; knows neither GPUs nor models.

A table has shape (kinds, ranks, units + 1, 2): seconds of a rank that holds `width` units, in each kind of step. Units form
runs of `per_run` (query heads of one KV head; 1 elsewhere); the last axis tells whether the range touches the fewest possible
runs (0) or one more (1), since a run that a cut divides costs both neighbours. Entries must not fall with width or with runs;
infinity forbids. Times of one stage: per kind the slowest rank's, then weighed over the kinds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from envs.perf_model.compiled import ONE, ZERO
from envs.perf_model.kernel_cache import cached_njit

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@cached_njit()
def overlapped_s(compute_s: float, comm_s: float, hidden_fraction: float) -> float:
    """Time of compute and communication of which `hidden_fraction` of the shorter is hidden behind the longer."""
    return max(compute_s, comm_s) + (1.0 - hidden_fraction) * min(compute_s, comm_s)


@cached_njit()
def _extra_run(start: int, end: int, per_run: int) -> int:
    """Runs touched by [start, end) beyond the fewest that hold its width: 0 or 1."""
    touched = (end + per_run - 1) // per_run - start // per_run
    return touched - (end - start + per_run - 1) // per_run


@cached_njit()
def _farthest(table: FloatArray, rank: int, start: int, per_run: int, cap: int, limits: FloatArray) -> int:
    """Largest end such that `rank` holds [start, end) within `cap` units and the time limits."""
    units = table.shape[2] - 1
    low, high = start, min(units, start + cap)
    while low < high:
        end = (low + high + 1) // 2
        extra = _extra_run(start, end, per_run)
        is_within = True
        for kind in range(table.shape[0]):
            if table[kind, rank, end - start, extra] > limits[kind]:
                is_within = False
        if is_within:
            low = end
        else:
            high = end - 1
    return low


@cached_njit()
def covers(table: FloatArray, per_run: int, caps: IntArray, limits: FloatArray) -> bool:
    """Whether ranks within the limits can hold all units.

    Reaching as far as possible is optimal: a later start never ends earlier, since [s', e) costs no more than [s, e).
    """
    units = table.shape[2] - 1
    end = ZERO
    for rank in range(table.shape[1]):
        end = _farthest(table, rank, end, per_run, caps[rank], limits)
        if end == units:
            return True
    return False


@cached_njit()
def _lowest(table: FloatArray, per_run: int, caps: IntArray, limits: FloatArray, kind: int, values: FloatArray) -> int:
    """Index of the smallest of `values` that, as the limit of `kind`, still lets the ranks cover; -1 for none."""
    low, high = 0, values.shape[0] - 1
    trial = limits.copy()
    trial[kind] = values[high] if high >= 0 else np.inf
    if high < 0 or not covers(table, per_run, caps, trial):
        return -1
    while low < high:
        middle = (low + high) // 2
        trial[kind] = values[middle]
        if covers(table, per_run, caps, trial):
            high = middle
        else:
            low = middle + 1
    return low


@cached_njit()
def stage_cost_s(limits: FloatArray, kind_weight: FloatArray, comm_s: FloatArray, hidden_fraction: float) -> float:
    total = 0.0
    for kind in range(limits.shape[0]):
        total += kind_weight[kind] * overlapped_s(limits[kind], comm_s[kind], hidden_fraction)
    return total


@cached_njit()
def best_limits(
    table: FloatArray,
    first_values: FloatArray,
    last_values: FloatArray,
    per_run: int,
    caps: IntArray,
    kind_weight: FloatArray,
    comm_s: FloatArray,
    hidden_fraction: float,
) -> FloatArray:
    """Time limits per kind, shape (kinds,), of the cheapest cover; infinite where none exists. One or two kinds.

    `first_values` and `last_values` are the sorted finite entries of the first and the last kind. The best limits are entries:
    each is some rank's time. With two kinds a sweep raises the first limit and lowers the second, so that every undominated
    pair is seen once. Ties (communication is longer) go to the least compute.
    """
    kinds = table.shape[0]
    limits = np.full(kinds, np.inf)
    best = np.full(kinds, np.inf)
    first = _lowest(table, per_run, caps, limits, ZERO, first_values)
    if first < 0:
        return best
    best[0] = first_values[first]
    if kinds == 1:
        return best
    floor = last_values[_lowest(table, per_run, caps, limits, ONE, last_values)]
    limits[0] = first_values[first]
    last = _lowest(table, per_run, caps, limits, ONE, last_values)
    best[1] = last_values[last]
    best_s = stage_cost_s(best, kind_weight, comm_s, hidden_fraction)
    best_compute_s = kind_weight[0] * best[0] + kind_weight[1] * best[1]
    for index in range(first + 1, first_values.shape[0]):
        limits[0] = first_values[index]
        limits[1] = floor
        if last_values[last] <= floor or stage_cost_s(limits, kind_weight, comm_s, hidden_fraction) > best_s:
            break
        while last > 0:
            limits[1] = last_values[last - 1]
            if not covers(table, per_run, caps, limits):
                break
            last -= 1
        limits[1] = last_values[last]
        cost_s = stage_cost_s(limits, kind_weight, comm_s, hidden_fraction)
        compute_s = kind_weight[0] * limits[0] + kind_weight[1] * limits[1]
        if cost_s < best_s or (cost_s == best_s and compute_s < best_compute_s):
            best_s, best_compute_s = cost_s, compute_s
            for kind in range(kinds):  # a slice assignment takes three seconds to compile
                best[kind] = limits[kind]
    return best


@cached_njit()
def cut_within(table: FloatArray, per_run: int, caps: IntArray, limits: FloatArray) -> IntArray:
    """Widths, shape (ranks,), of a cover within feasible `limits`; slack is shared, and cuts prefer the edge of a run.

    Cut r may lie anywhere from the earliest start from which the ranks r, r + 1, ... still reach the end, to where rank r - 1
    reaches; starting no earlier than that keeps the rest feasible, as reach never falls with the start.
    """
    units, ranks = table.shape[2] - 1, table.shape[1]
    earliest = np.empty(ranks + 1, dtype=np.int64)
    earliest[ranks] = units
    for rank in range(ranks - 1, -1, -1):
        start = earliest[rank + 1]
        while start > 0 and _farthest(table, rank, start - 1, per_run, caps[rank], limits) >= earliest[rank + 1]:
            start -= 1
        earliest[rank] = start
    widths = np.zeros(ranks, dtype=np.int64)
    start = 0
    for rank in range(ranks):
        low = max(earliest[rank + 1], start)
        high = _farthest(table, rank, start, per_run, caps[rank], limits)
        cut = (low + high + 1) // 2
        edge = ((cut + per_run // 2) // per_run) * per_run
        if low <= edge <= high:
            cut = edge
        widths[rank] = cut - start
        start = cut
    return widths


@cached_njit()
def _joint_cover(
    table: FloatArray,
    per_run: int,
    limits: FloatArray,
    other_caps: IntArray,
    free_bytes: FloatArray,
    unit_bytes: float,
    run_bytes: float,
    other_bytes: float,
    back: IntArray,
) -> IntArray:
    """Most units of the other cut held when [0, u) of this one is, after all ranks, shape (units + 1,); -1 impossible.

    Rank by rank, state = units covered so far: what a rank leaves of its memory holds the other cut's units, at most
    `other_caps` of them. `back`, shape (ranks, units + 1), receives each state's best previous state.
    """
    units, ranks = table.shape[2] - 1, table.shape[1]
    most = np.full(units + 1, -1, dtype=np.int64)
    most[0] = 0
    for rank in range(ranks):
        after = np.full(units + 1, -1, dtype=np.int64)
        for start in range(units + 1):
            if most[start] < 0:
                continue
            for end in range(start, units + 1):
                extra = _extra_run(start, end, per_run) if end > start else 0
                width = end - start
                is_slow = False
                for kind in range(table.shape[0]):
                    if table[kind, rank, width, extra] > limits[kind]:
                        is_slow = True
                runs = (width + per_run - 1) // per_run + extra
                left = free_bytes[rank] - width * unit_bytes - runs * run_bytes
                if is_slow or left < 0:
                    break
                other = most[start] + min(other_caps[rank], int(left // other_bytes))
                if other > after[end]:
                    after[end] = other
                    back[rank, end] = start
        most = after
    return most


@cached_njit()
def _caps_within(table: FloatArray, limit: float, caps: IntArray) -> IntArray:
    """Most units per rank within `caps` and a time limit on the first kind, where runs do not matter."""
    result = np.zeros(table.shape[1], dtype=np.int64)
    limits = np.full(1, limit)
    for rank in range(table.shape[1]):
        result[rank] = _farthest(table[:1], rank, ZERO, ONE, caps[rank], limits)
    return result


@cached_njit()
def joint_limits(
    table: FloatArray,
    values: FloatArray,
    per_run: int,
    other_table: FloatArray,
    other_values: FloatArray,
    free_bytes: FloatArray,
    unit_bytes: float,
    run_bytes: float,
    other_bytes: float,
    comm_s: float,
    hidden_fraction: float,
) -> tuple[FloatArray, IntArray]:
    """Cheapest sum of two stages' slowest ranks when both cuts share each rank's memory. One kind of step.

    Returns: the limits of both stages, shape (2,), infinite where nothing fits, and this cut's widths, shape (ranks,).
    Exact: every limit of this stage is tried from the lowest, and the other stage's lowest feasible limit never rises with it.
    """
    units, ranks = table.shape[2] - 1, table.shape[1]
    other_units = other_table.shape[2] - 1
    caps = np.full(ranks, other_units, dtype=np.int64)
    back = np.zeros((ranks, units + 1), dtype=np.int64)
    limit = np.empty(1)
    best = np.full(2, np.inf)
    widths = np.zeros(ranks, dtype=np.int64)
    best_s = np.inf
    other: int = other_values.shape[0]
    if other == 0:
        return best, widths
    floor_s = overlapped_s(other_values[0], comm_s, hidden_fraction)
    first, beyond = 0, values.shape[0]
    other_caps = _caps_within(other_table, other_values[other - 1], caps)
    while first < beyond:  # below `first` nothing fits, however slow the other stage may be
        limit[0] = values[(first + beyond) // 2]
        most = _joint_cover(table, per_run, limit, other_caps, free_bytes, unit_bytes, run_bytes, other_bytes, back)
        if most[units] >= other_units:
            beyond = (first + beyond) // 2
        else:
            first = (first + beyond) // 2 + 1
    for index in range(first, values.shape[0]):
        limit[0] = values[index]
        if other == 0 or overlapped_s(limit[0], comm_s, hidden_fraction) + floor_s > best_s:
            break
        low, high = 0, other
        while low < high:
            # The top is tried first: most limits of this stage let the other sink no further than it has.
            trial = other - 1 if high == other else (low + high) // 2
            other_caps = _caps_within(other_table, other_values[trial], caps)
            most = _joint_cover(table, per_run, limit, other_caps, free_bytes, unit_bytes, run_bytes, other_bytes, back)
            if most[units] >= other_units:
                high = trial
            elif high == other:
                break
            else:
                low = trial + 1
        if high == other:
            continue
        other = high
        this_s, other_s = values[index], other_values[high]
        cost_s = overlapped_s(this_s, comm_s, hidden_fraction) + overlapped_s(other_s, comm_s, hidden_fraction)
        if cost_s < best_s:
            best_s = cost_s
            best[0], best[1] = this_s, other_s
    if np.isfinite(best_s):
        limit[0] = best[0]
        other_caps = _caps_within(other_table, best[1], caps)
        _joint_cover(table, per_run, limit, other_caps, free_bytes, unit_bytes, run_bytes, other_bytes, back)
        end = units
        for rank in range(ranks - 1, -1, -1):
            widths[rank] = end - back[rank, end]
            end = back[rank, end]
    return best, widths
