"""LiteLLM spend logs and standard logging payloads (JSONL or one JSON array). Source: BerriAI/litellm, logging_spec.

startTime is a calendar stamp (spend logs) or epoch seconds (standard payload).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envs.traces.cell_values import epoch_ns, required, token_count
from envs.traces.formats.reader import Reader
from envs.traces.read_options import ReadOptions
from envs.traces.timestamps import NS_PER_S
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow

COLUMNS = ("startTime", "endTime", "prompt_tokens", "completion_tokens")


def _session(record: dict[str, Any]) -> str | None:
    for key in ("session_id", "trace_id"):
        if record.get(key):
            return str(record[key])
    return None


def _limit(record: dict[str, Any]) -> Any:
    parameters = record.get("model_parameters")
    return parameters.get("max_tokens") if isinstance(parameters, dict) else None


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows in file order (which is the order of the answers); failures and cache hits are left out, counted."""
    zero_ns: int | None = None
    for line, outer in file.json_objects():
        inner = outer.get("standard_logging_object")
        record = inner if isinstance(inner, dict) else outer
        start_ns = epoch_ns(record.get("startTime"), file, line, "startTime", options)
        zero_ns = start_ns if zero_ns is None else zero_ns
        if str(record.get("status", "success")).lower() not in ("success", ""):
            report.left_out[f"status {record['status']}"] += 1
            continue
        if str(record.get("cache_hit", "")).lower() == "true":
            report.left_out["answered from LiteLLM's cache, never reached a model"] += 1
            continue
        end_ns = epoch_ns(record.get("endTime") or start_ns / NS_PER_S, file, line, "endTime", options)
        limit = _limit(record)
        yield TraceRow(
            (start_ns - zero_ns) / NS_PER_S,
            token_count(required(record, "prompt_tokens", COLUMNS, file, line), file, line, "prompt_tokens"),
            token_count(required(record, "completion_tokens", COLUMNS, file, line), file, line, "completion_tokens"),
            session=_session(record),
            output_limit_tokens=None if limit is None else token_count(limit, file, line, "max_tokens"),
            extra={"model": record.get("model"), "e2e_s": (end_ns - start_ns) / NS_PER_S},
        )


def _recognise(head: TraceHead) -> bool:
    return isinstance(head.first, dict) and ({"startTime", "completion_tokens"} <= head.keys or "standard_logging_object" in head.keys)


READER = Reader("litellm-log", "calendar stamps or epoch seconds", COLUMNS, read, _recognise)
