"""Qwen-Bailian anonymised traces (JSONL): seconds, 16-token blocks, conversations linked by parent_chat_id.

Source: alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from collections.abc import Iterator

from envs.traces.cell_values import required, seconds, token_count
from envs.traces.formats.mooncake import block_ids
from envs.traces.formats.reader import Reader, has_keys
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile
from envs.traces.trace_row import ReadReport, TraceRow

COLUMNS = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length")
BLOCK_TOKENS = 16
CLASS_OF_TYPE = {"coder": "code"}


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows in file order; the session of a row is the id of its conversation's first chat."""
    root_of: dict[object, object] = {}
    for line, record in file.json_objects():
        chat = required(record, "chat_id", COLUMNS, file, line)
        parent = record.get("parent_chat_id", -1)
        root = chat if parent == -1 else root_of.get(parent, parent)
        root_of[chat] = root
        kind = record.get("type")
        yield TraceRow(
            seconds(record.get("timestamp"), 1.0, file, line, "timestamp", options),
            token_count(required(record, "input_length", COLUMNS, file, line), file, line, "input_length"),
            token_count(required(record, "output_length", COLUMNS, file, line), file, line, "output_length"),
            service_class=CLASS_OF_TYPE.get(str(kind)),
            session=str(root),
            prefix_blocks=block_ids(record.get("hash_ids", []), file, line),
            block_tokens=BLOCK_TOKENS,
            extra={"type": kind, "turn": record.get("turn")},
        )


READER = Reader("bailian", "seconds", COLUMNS, read, has_keys("chat_id", "parent_chat_id", "input_length"))
