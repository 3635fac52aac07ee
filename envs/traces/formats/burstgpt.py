"""BurstGPT 1, 2 and 3 (CSV): seconds since day 0; a failed request has 0 response tokens. Source: HPMLL/BurstGPT."""

from __future__ import annotations

from collections.abc import Iterator

from envs.traces.cell_values import seconds, token_count
from envs.traces.formats.reader import Reader, has_columns
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile
from envs.traces.trace_row import ReadReport, TraceRow

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows in file order; arrival in the file's own seconds since day 0."""
    optional = ("Model", "Log Type", "Session ID")
    for line, (stamp, prompt, output, model, log_type, session) in file.csv_records(COLUMNS, optional):
        yield TraceRow(
            seconds(stamp, 1.0, file, line, "Timestamp", options),
            token_count(prompt, file, line, "Request tokens"),
            token_count(output, file, line, "Response tokens"),
            session=session or None,
            extra={"model": model, "log_type": log_type},
        )


READER = Reader("burstgpt", "seconds", COLUMNS, read, has_columns(*COLUMNS))
