"""Weka agent traces: one JSON object per session, or one request a line. Source: semianalysisai/cc-traces-weka.

Times count from each session's own start and there is no global clock: a made-up arrival process places the starts.
Block ids are local to a session, so they are made global here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from envs.traces.cell_values import required, seconds, token_count
from envs.traces.formats.mooncake import block_ids
from envs.traces.formats.reader import Reader
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow

FLAT_COLUMNS = ("session_id", "request_arrival_delta_s", "input_tokens", "output_tokens")
SESSION_COLUMNS = ("id", "block_size", "requests")


def _starts_s(options: ReadOptions) -> Iterator[float]:
    if options.arrival is None:
        raise AssertionError("open_trace refuses agent sessions without an arrival process")
    return options.arrival.arrivals_s(np.random.default_rng(options.seed))


def read_flat(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield one row a line; the file knows how many blocks a prompt has, not which, so there are no prefix blocks."""
    starts_s = _starts_s(options)
    start_of: dict[str, float] = {}
    report.note("block ids are not in this form of the file: prefix sharing inside a session is unknown")
    for line, record in file.json_objects():
        session = str(required(record, "session_id", FLAT_COLUMNS, file, line))
        if session not in start_of:
            start_of[session] = next(starts_s)
        delta = required(record, "request_arrival_delta_s", FLAT_COLUMNS, file, line)
        yield TraceRow(
            start_of[session] + seconds(delta, 1.0, file, line, "request_arrival_delta_s", options),
            token_count(required(record, "input_tokens", FLAT_COLUMNS, file, line), file, line, "input_tokens"),
            token_count(required(record, "output_tokens", FLAT_COLUMNS, file, line), file, line, "output_tokens"),
            session=session,
            extra={key: record.get(key) for key in ("turn_index", "think_time_s", "ttft_s", "api_time_s")},
        )


def _sessions(file: TraceFile) -> Iterator[tuple[TraceFile, int, dict[str, Any]]]:
    """Session objects of a folder of .json files, of one JSON document, or of JSONL."""
    if file.path.is_dir():
        for path in sorted(file.path.glob("*.json*")):
            yield from _sessions(TraceFile(path))
        return
    with file.text() as text:
        first = text.readline()
        try:
            json.loads(first)
            is_lines = True
        except ValueError:
            is_lines = first.lstrip().startswith("[")
        if not is_lines:  # one document over many lines: a single session, which has to fit in memory
            try:
                document = json.loads(first + text.read())
            except ValueError as fault:
                raise file.error(f"is no valid JSON ({fault})") from fault
            yield file, 1, document
            return
    for line, record in file.json_objects():
        yield file, line, record


def read_sessions(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield the requests of each session, subagents' included, in the order they are listed."""
    starts_s = _starts_s(options)
    ids: dict[tuple[str, int], int] = {}
    for owner, line, session in _sessions(file):
        name = str(required(session, "id", SESSION_COLUMNS, owner, line))
        block_tokens = token_count(session.get("block_size", 64), owner, line, "block_size")
        is_local = session.get("hash_id_scope", "local") == "local"
        start_s = next(starts_s)
        for request in required(session, "requests", SESSION_COLUMNS, owner, line):
            if not isinstance(request, dict):
                raise owner.error(f"a request is a {type(request).__name__}, expected an object", line)
            blocks = block_ids(request.get("hash_ids") or [], owner, line)
            scope = name if is_local else ""
            yield TraceRow(
                start_s + seconds(request.get("t"), 1.0, owner, line, "t", options),
                token_count(required(request, "in", ("t", "in", "out"), owner, line), owner, line, "in"),
                token_count(required(request, "out", ("t", "in", "out"), owner, line), owner, line, "out"),
                session=name,
                prefix_blocks=tuple(ids.setdefault((scope, block), len(ids)) for block in blocks),
                block_tokens=block_tokens,
                extra={key: request.get(key) for key in ("type", "model", "think_time", "ttft", "api_time")},
            )


def _is_sessions(head: TraceHead) -> bool:
    if not isinstance(head.first, dict):
        return False
    return {"id", "requests"} <= head.keys or {"id", "block_size", "hash_id_scope"} <= head.keys


def _is_flat(head: TraceHead) -> bool:
    return {"session_id", "request_arrival_delta_s", "input_tokens"} <= head.keys


FLAT_READER = Reader("weka-flat", "seconds", FLAT_COLUMNS, read_flat, _is_flat, "code", needs_arrival=True, places_sessions=True)
SESSIONS_READER = Reader("weka", "seconds", SESSION_COLUMNS, read_sessions, _is_sessions, "code", needs_arrival=True, places_sessions=True)
