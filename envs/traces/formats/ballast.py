"""The canonical format (JSONL): a head object, then one object a request with the fields of TraceRow; seconds and tokens.

Fields that are None or empty are left out. Floats are written so that they read back to the same bits. The service's request records
(`--record-dir`) are such files; a service that was killed leaves its last line unfinished, which is left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from envs.traces.cell_values import required, seconds, token_count
from envs.traces.formats.mooncake import block_ids
from envs.traces.formats.reader import Reader
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow

VERSION = 1
TORN = "last line unfinished (its writer was killed)"
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
OPTIONAL = ("service_class", "priority", "session", "prefix_blocks", "block_tokens", "output_limit_tokens", "extra")


def head_line(source: str, default_class: str, synthetic: bool) -> str:
    """The first line of a file: version, where the rows come from, class of rows without one, made up or measured."""
    return json.dumps({"ballast_trace": VERSION, "source": source, "default_class": default_class, "synthetic": synthetic})


def row_line(row: TraceRow) -> str:
    """One row as a JSON object."""
    record: dict[str, Any] = {name: getattr(row, name) for name in COLUMNS}
    for name in OPTIONAL:
        value = getattr(row, name)
        if value not in (None, (), {}) and not (name == "block_tokens" and value == 0):
            record[name] = value
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield the rows exactly as they were written."""
    for line, record in file.json_objects(lambda: report.left_out.update((TORN,))):
        if line == 1 and "ballast_trace" in record:
            if record["ballast_trace"] != VERSION:
                raise file.error(f"ballast_trace={record['ballast_trace']!r}; this reader knows version {VERSION}", line)
            report.default_class = str(record.get("default_class", report.default_class))
            report.synthetic = bool(record.get("synthetic", False))
            report.note(f"converted from {record.get('source')}")
            continue
        for key in record:
            if key not in COLUMNS and key not in OPTIONAL:
                raise file.error(f"key {key!r} unknown; known: {', '.join(COLUMNS + OPTIONAL)}", line)
        limit, priority = record.get("output_limit_tokens"), record.get("priority")
        yield TraceRow(
            seconds(required(record, "arrival_s", COLUMNS, file, line), 1.0, file, line, "arrival_s", options),
            token_count(required(record, "prompt_tokens", COLUMNS, file, line), file, line, "prompt_tokens"),
            token_count(required(record, "output_tokens", COLUMNS, file, line), file, line, "output_tokens"),
            record.get("service_class"),
            None if priority is None else token_count(priority, file, line, "priority"),
            record.get("session"),
            block_ids(record.get("prefix_blocks", []), file, line),
            token_count(record.get("block_tokens", 0), file, line, "block_tokens"),
            None if limit is None else token_count(limit, file, line, "output_limit_tokens"),
            record.get("extra", {}),
        )


def _recognise(head: TraceHead) -> bool:
    return isinstance(head.first, dict) and ("ballast_trace" in head.keys or set(COLUMNS) <= head.keys)


READER = Reader("ballast", "seconds", COLUMNS, read, _recognise)
