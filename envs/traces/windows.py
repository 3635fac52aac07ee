"""Windows of a trace that no two uses share: training, validation and test must be disjoint in time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from envs.traces.trace_row import TraceError
from envs.traces.trace_table import TraceTable

Window = tuple[float, float]
QUIET_LOAD_FRACTION = 0.05


def split_windows(table: TraceTable, fractions: Sequence[float] = (0.6, 0.2, 0.2)) -> tuple[Window, ...]:
    """Cut the trace's time, first arrival to last, into consecutive windows (start_s, end_s), end excluded.

    fractions: shares of the span, positive, adding up to at most 1. The last window's end lies just above the last
    arrival when they add up to 1. Raises TraceError otherwise, or when a window would hold no request.
    """
    if not fractions or min(fractions) <= 0 or sum(fractions) > 1 + 1e-9:
        raise TraceError(f"split of {table.source}: fractions {tuple(fractions)} must be positive and add up to at most 1")
    if table.span_s <= 0:
        raise TraceError(f"split of {table.source}: {len(table)} requests span no time; give a longer trace")
    first_s = float(table.arrival_s[0])
    edges_s = first_s + table.span_s * np.concatenate(([0.0], np.cumsum(fractions)))
    if sum(fractions) > 1 - 1e-9:
        edges_s[-1] = np.nextafter(table.arrival_s[-1], np.inf)
    windows = tuple(zip(edges_s[:-1].tolist(), edges_s[1:].tolist(), strict=True))
    for start_s, end_s in windows:
        if not np.searchsorted(table.arrival_s, end_s) > np.searchsorted(table.arrival_s, start_s):
            raise TraceError(f"split of {table.source}: no request in {start_s:g} to {end_s:g} s; choose other fractions")
    return windows


def check_disjoint(windows: Sequence[Window], names: Sequence[str] | None = None) -> None:
    """Raise TraceError naming the first two windows that share any time; end is excluded, so touching is allowed."""
    labels = list(names) if names is not None else [f"window {index}" for index in range(len(windows))]
    if len(labels) != len(windows):
        raise TraceError(f"{len(windows)} windows with {len(labels)} names; give one name each")
    for (start_s, end_s), label in zip(windows, labels, strict=True):
        if not start_s < end_s:
            raise TraceError(f"{label}: start {start_s:g} s must lie before end {end_s:g} s")
    order = sorted(range(len(windows)), key=lambda index: windows[index])
    for one, two in pairwise(order):
        if windows[two][0] < windows[one][1]:
            raise TraceError(
                f"{labels[one]} ({windows[one][0]:g} to {windows[one][1]:g} s) and {labels[two]} ({windows[two][0]:g} to "
                f"{windows[two][1]:g} s) overlap; what is trained on must not be tested on: move one"
            )


def quiet_warning(table: TraceTable, capacity_tokens_per_s: float) -> str | None:
    """A warning when the mean load is under 5 % of capacity, where every policy ties; else None.

    Load: prompt and output tokens over the span, per second; capacity in the same tokens per second.
    """
    if not capacity_tokens_per_s > 0:
        raise TraceError(f"capacity_tokens_per_s={capacity_tokens_per_s} must be positive")
    tokens = float(table.prompt_tokens.sum(dtype=np.int64) + table.output_tokens.sum(dtype=np.int64))
    load = tokens / max(table.span_s, 1e-9) / capacity_tokens_per_s
    if load >= QUIET_LOAD_FRACTION:
        return None
    return f"{table.source}: mean load is {load:.1%} of capacity, under 5 %: a comparison of policies on it says nothing"
