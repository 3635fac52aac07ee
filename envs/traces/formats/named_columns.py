"""The generic format: CSV, JSONL or a JSON array with columns and unit named by the caller; nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envs.domain.suggestions import unknown_name
from envs.traces.cell_values import epoch_ns, required, seconds, token_count
from envs.traces.formats.reader import Reader
from envs.traces.read_options import TIME_UNITS_S, ReadOptions
from envs.traces.timestamps import NS_PER_S
from envs.traces.trace_file import TraceFile
from envs.traces.trace_row import ReadReport, TraceError, TraceRow

ROLES = ("arrival", "prompt", "output", "session", "service_class", "priority", "output_limit")


def _records(file: TraceFile, names: dict[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    if isinstance(file.head().first, dict):
        yield from file.json_objects()
        return
    columns = tuple(names.values())
    for line, cells in file.csv_records(columns):
        yield line, dict(zip(columns, cells, strict=True))


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows; calendar stamps (time unit "stamp") count from the first row."""
    names = dict(options.columns)
    for role in names:
        if role not in ROLES:
            raise TraceError(unknown_name("column role", role, ROLES))
    for role in ("prompt", "output", *(() if options.arrival else ("arrival",))):
        if role not in names:
            raise TraceError(f"{file.path}: no column named for {role}; give e.g. --columns arrival=ts,prompt=in,output=out")
    if options.arrival:
        names.pop("arrival", None)
    wanted = tuple(names.values())
    zero_ns: int | None = None
    for line, record in _records(file, names):
        cell = {role: required(record, name, wanted, file, line) for role, name in names.items()}
        if "arrival" not in cell:
            arrival_s = 0.0
        elif options.time_unit == "stamp":
            now_ns = epoch_ns(cell["arrival"], file, line, names["arrival"], options)
            zero_ns = now_ns if zero_ns is None else zero_ns
            arrival_s = (now_ns - zero_ns) / NS_PER_S
        else:
            arrival_s = seconds(cell["arrival"], TIME_UNITS_S[options.time_unit], file, line, names["arrival"], options)
        limit, priority, session = cell.get("output_limit"), cell.get("priority"), cell.get("session")
        yield TraceRow(
            arrival_s,
            token_count(cell["prompt"], file, line, names["prompt"]),
            token_count(cell["output"], file, line, names["output"]),
            service_class=cell.get("service_class") or None,
            priority=None if priority in (None, "") else token_count(priority, file, line, names["priority"]),
            session=None if session in (None, "") else str(session),
            output_limit_tokens=None if limit in (None, "") else token_count(limit, file, line, names["output_limit"]),
        )


READER = Reader("columns", "--time-unit", ("--columns",), read, lambda head: False)
