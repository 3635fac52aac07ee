"""LLMServingSim 2 (JSONL, nanoseconds): flat requests, and agentic sessions of sub-requests.

Source: casys-kaist/LLMServingSim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envs.traces.cell_values import required, seconds, token_count
from envs.traces.formats.reader import Reader
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow

COLUMNS = ("input_toks", "output_toks", "arrival_time_ns")
_NS = 1e-9


def _row(record: dict[str, Any], arrival_s: float, session: str | None, file: TraceFile, line: int) -> TraceRow:
    return TraceRow(
        arrival_s,
        token_count(required(record, "input_toks", COLUMNS, file, line), file, line, "input_toks"),
        token_count(required(record, "output_toks", COLUMNS, file, line), file, line, "output_toks"),
        service_class=None if session is None else "code",
        session=session,
    )


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows; a sub-request arrives after the tool times of those before it, since answers take no time in a trace."""
    for line, record in file.json_objects():
        arrival_s = seconds(record.get("arrival_time_ns"), _NS, file, line, "arrival_time_ns", options)
        steps = record.get("sub_requests")
        if steps is None:
            yield _row(record, arrival_s, None, file, line)
            continue
        report.note("a sub-request arrives after the tool times of those before it; the answers' own time is not in the file")
        for step in steps:
            if not isinstance(step, dict):
                raise file.error(f"a sub-request is a {type(step).__name__}, expected an object", line)
            yield _row(step, arrival_s, str(record.get("session_id", f"line {line}")), file, line)
            arrival_s += seconds(step.get("tool_duration_ns") or 0, _NS, file, line, "tool_duration_ns", options)


def _recognise(head: TraceHead) -> bool:
    return "arrival_time_ns" in head.keys or {"input_toks", "output_toks"} <= head.keys or "sub_requests" in head.keys


READER = Reader("llmservingsim", "nanoseconds", COLUMNS, read, _recognise)
