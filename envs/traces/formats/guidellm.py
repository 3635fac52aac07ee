"""GuideLLM trace_synthetic (CSV or JSONL): seconds; names as GuideLLM's defaults. Source: vllm-project/guidellm.

The JSONL keys equal AIPerf's, whose unit is milliseconds, so JSONL is read only when the format is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from envs.traces.cell_values import required, seconds, token_count
from envs.traces.formats.mooncake import block_ids
from envs.traces.formats.reader import Reader, has_columns
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile
from envs.traces.trace_row import ReadReport, TraceRow

COLUMNS = ("timestamp", "input_length", "output_length")
BLOCK_TOKENS = 512


def _records(file: TraceFile, names: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    if isinstance(file.head().first, dict):
        yield from file.json_objects()
        return
    optional = ("conversation_id", "hash_ids")
    for line, cells in file.csv_records(names, optional):
        yield line, {key: cell for key, cell in zip((*names, *optional), cells, strict=True) if cell is not None}


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows; `options.columns` renames arrival, prompt and output as GuideLLM's *_column settings do."""
    stamp, prompt, output = (options.columns.get(key, name) for key, name in zip(("arrival", "prompt", "output"), COLUMNS, strict=True))
    names = (stamp, prompt, output)
    for line, record in _records(file, names):
        session = record.get("conversation_id") or None
        blocks = record.get("hash_ids") or []
        yield TraceRow(
            seconds(record.get(stamp), 1.0, file, line, stamp, options),
            token_count(required(record, prompt, names, file, line), file, line, prompt),
            token_count(required(record, output, names, file, line), file, line, output),
            session=None if session is None else str(session),
            prefix_blocks=() if isinstance(blocks, str) else block_ids(blocks, file, line),
            block_tokens=BLOCK_TOKENS,
        )


READER = Reader("guidellm", "seconds", COLUMNS, read, has_columns(*COLUMNS))
