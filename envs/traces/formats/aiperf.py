"""AIPerf `mooncake_trace` with sessions or delays, and `multi_turn` (JSONL, milliseconds). Source: ai-dynamo/aiperf.

In AIPerf a turn starts `delay` after the answer before it; a trace knows no answers, so here a turn arrives `delay`
after the turn before it, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from envs.traces.cell_values import seconds, token_count
from envs.traces.formats.mooncake import block_ids
from envs.traces.formats.reader import Reader
from envs.traces.formats.text_tokens import text_tokens
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow

COLUMNS = ("timestamp or delay", "input_length or text_input or messages", "output_length")
BLOCK_TOKENS = 512
_MS = 1e-3


def _prompt_text(record: dict[str, Any], file: TraceFile, line: int) -> str:
    for key in ("text_input", "text"):
        if isinstance(record.get(key), str):
            return str(record[key])
    body = record.get("payload")
    messages = record.get("messages", body.get("messages") if isinstance(body, dict) else None)
    if isinstance(messages, list):
        return "\n".join(str(message.get("content", "")) for message in messages if isinstance(message, dict))
    raise file.error(f"has none of input_length, text_input, messages, payload; columns found: {', '.join(record)}", line)


def _output_tokens(record: dict[str, Any], options: ReadOptions, file: TraceFile, line: int) -> int:
    value = record.get("output_length", record.get("max_tokens"))
    if value is not None:
        return token_count(value, file, line, "output_length")
    if options.default_output_tokens is None:
        raise file.error("output_length is absent; give one, or choose --default-output-tokens", line)
    return options.default_output_tokens


def _turns(file: TraceFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """Records with multi-turn ones taken apart."""
    for line, record in file.json_objects():
        turns = record.get("turns")
        if not isinstance(turns, list):
            yield line, record
            continue
        for turn in turns:
            if not isinstance(turn, dict):
                raise file.error(f"a turn is a {type(turn).__name__}, expected an object", line)
            yield line, {"session_id": record.get("session_id", f"line {line}"), **turn}


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows; with a made-up arrival process it places each session's first turn and each lone row."""
    made_up = None if options.arrival is None else options.arrival.arrivals_s(np.random.default_rng(options.seed))
    last_s: dict[str, float] = {}
    for line, record in _turns(file):
        raw_session = record.get("session_id")
        session = None if raw_session is None else str(raw_session)
        if session in last_s and record.get("timestamp") is None:
            delay_s = seconds(record.get("delay", 0), _MS, file, line, "delay", options)
            arrival_s = last_s[session] + delay_s
            report.note("a turn arrives its delay after the turn before it, not after that turn's answer")
        elif made_up is not None:
            arrival_s = next(made_up)
        else:
            arrival_s = seconds(record.get("timestamp"), _MS, file, line, "timestamp", options)
        if session is not None:
            last_s[session] = arrival_s
        length = record.get("input_length")
        prompt = (
            token_count(length, file, line, "input_length")
            if length is not None
            else text_tokens(_prompt_text(record, file, line), options, file, line)
        )
        yield TraceRow(
            arrival_s,
            prompt,
            _output_tokens(record, options, file, line),
            session=session,
            prefix_blocks=block_ids(record.get("hash_ids") or [], file, line),
            block_tokens=BLOCK_TOKENS,
        )


def _recognise(head: TraceHead) -> bool:
    if not isinstance(head.first, dict):
        return False
    keys = head.keys
    if "turns" in keys:
        return True
    lengths = {"input_length", "text_input", "messages", "payload"} & keys
    return bool(lengths) and bool({"session_id", "delay", "text_input", "payload"} & keys) and "output_tokens" not in keys


READER = Reader("aiperf", "milliseconds", COLUMNS, read, _recognise, places_sessions=True)
