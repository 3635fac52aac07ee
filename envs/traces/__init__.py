"""Traces: reading every common format, tables in memory, windows, and synthetic twins. Names -> readers in `READERS`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np

from envs.traces.arrivals import ArrivalProcess
from envs.traces.formats import READERS
from envs.traces.read_options import ReadOptions
from envs.traces.trace_row import ReadReport, TraceError, TraceRow
from envs.traces.trace_stream import TraceStream, open_trace
from envs.traces.trace_table import TraceTable, mix, table_of_rows

__all__ = [
    "READERS",
    "ArrivalProcess",
    "ReadOptions",
    "ReadReport",
    "TraceError",
    "TraceRow",
    "TraceStream",
    "TraceTable",
    "load_trace",
    "mix",
    "open_trace",
    "table_of_rows",
]


def load_trace(
    path: str | Path,
    format: str | None = None,
    *,
    limit: int | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
    repeat: bool = False,
    options: ReadOptions | None = None,
    **choices: object,
) -> TraceTable:
    """Read a trace into a table.

    limit: that many requests, no fewer: the file's first usable rows, or the window's first. Fewer in the file is a
    TraceError, unless `repeat` lays copies end to end (the table's source says so). start_s, end_s: a window of the
    trace, seconds, re-based to start_s. choices: fields of ReadOptions. Raises TraceError, one line.
    """
    if limit is not None and limit < 1:
        raise TraceError(f"limit={limit} must be at least 1")
    stream = open_trace(path, format, options, **choices)
    windowed = start_s is not None or end_s is not None
    rows = iter(stream)
    if limit is not None and not windowed:
        rows = islice(rows, limit)
    table = table_of_rows(rows, str(path), stream.report)
    if windowed:
        table = table.slice(start_s or 0.0, float("inf") if end_s is None else end_s)
    if limit is None or len(table) == limit:
        return table
    if len(table) > limit:
        return table.take(np.arange(limit))
    if repeat and len(table):
        return table.repeat_to(limit)
    left_out = f", {stream.report.rows_left_out} left out" if stream.report.rows_left_out else ""
    raise TraceError(f"{path}: {limit} requests wanted, {len(table)} there{left_out}; ask for at most {len(table)}, or for a repeat")
