"""Mooncake (JSONL, milliseconds, 512-token blocks) and vLLM's timed_trace, which uses the same keys with its own unit.

Source: kvcache-ai/Mooncake FAST25-release; vLLM `bench serve --dataset-name timed_trace`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envs.traces.cell_values import required, seconds, token_count
from envs.traces.formats.reader import Read, Reader
from envs.traces.read_options import TIME_UNITS_S, ReadOptions
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow

COLUMNS = ("timestamp", "input_length", "output_length", "hash_ids")


def block_ids(value: Any, file: TraceFile, line: int) -> tuple[int, ...]:
    """A list of whole numbers as a tuple."""
    if not isinstance(value, list) or not all(type(block) is int for block in value):
        raise file.error(f"hash_ids={str(value)[:60]!r} is no list of whole numbers", line)
    return tuple(value)


def reader_of(block_tokens: int, unit_s: float | None) -> Read:
    """A reading for blocks of this size; unit None takes the unit from `options.time_unit`."""

    def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
        factor = unit_s if unit_s is not None else TIME_UNITS_S.get(options.time_unit, 1.0)
        blocks_short = 0
        for line, record in file.json_objects():
            prompt = token_count(required(record, "input_length", COLUMNS, file, line), file, line, "input_length")
            blocks = block_ids(record.get("hash_ids", []), file, line)
            blocks_short += bool(blocks) and len(blocks) != -(-prompt // block_tokens)
            yield TraceRow(
                seconds(record.get("timestamp"), factor, file, line, "timestamp", options),
                prompt,
                token_count(required(record, "output_length", COLUMNS, file, line), file, line, "output_length"),
                prefix_blocks=blocks,
                block_tokens=block_tokens,
            )
        if blocks_short:
            report.note(f"{blocks_short} rows do not have ceil(input_length / {block_tokens}) hash_ids; block size may be another")

    return read


def _recognise(head: TraceHead) -> bool:
    foreign = {"session_id", "chat_id", "delay", "text_input", "messages", "payload"}
    return isinstance(head.first, dict) and {"input_length", "hash_ids"} <= head.keys and not foreign & head.keys


READER = Reader("mooncake", "milliseconds", COLUMNS, reader_of(512, 1e-3), _recognise)
TIMED_READER = Reader("vllm-timed", "--time-unit", COLUMNS, reader_of(16, None), lambda head: False)
