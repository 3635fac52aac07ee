"""splitwise-sim request traces (CSV, seconds). Source: Mutinifni/splitwise-sim."""

from __future__ import annotations

from collections.abc import Iterator

from envs.traces.cell_values import seconds, token_count
from envs.traces.formats.reader import Reader, has_columns
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile
from envs.traces.trace_row import ReadReport, TraceRow

COLUMNS = ("arrival_timestamp", "prompt_size", "token_size")


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield one row per request; a batch_size above 1 is refused, since one row would stand for several requests."""
    optional = ("request_id", "request_type", "application_id", "batch_size")
    for line, (stamp, prompt, output, request_id, kind, application, batch) in file.csv_records(COLUMNS, optional):
        if batch not in (None, "", "1"):
            raise file.error(f"batch_size={batch!r}: only batches of 1 are one request a row; split the row", line)
        yield TraceRow(
            seconds(stamp, 1.0, file, line, "arrival_timestamp", options),
            token_count(prompt, file, line, "prompt_size"),
            token_count(output, file, line, "token_size"),
            extra={"request_id": request_id, "request_type": kind, "application_id": application},
        )


READER = Reader("splitwise-sim", "seconds", COLUMNS, read, has_columns(*COLUMNS))
