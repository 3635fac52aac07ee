"""Vidur (CSV): processed traces with arrivals in seconds, and length-only files. Source: microsoft/vidur."""

from __future__ import annotations

from collections.abc import Iterator

from envs.traces.cell_values import seconds, token_count
from envs.traces.formats.reader import Reader
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow

LENGTHS = ("num_prefill_tokens", "num_decode_tokens")
COLUMNS = ("arrived_at", *LENGTHS)


def _name_class(file: TraceFile, report: ReadReport) -> None:
    if "arxiv" in file.name.lower():
        report.default_class = "batch"
        report.note('class "batch" because the file name says arxiv')


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows with the file's arrivals."""
    _name_class(file, report)
    for line, (arrived, prompt, output) in file.csv_records(COLUMNS):
        arrival_s = seconds(arrived, 1.0, file, line, "arrived_at", options)
        yield TraceRow(arrival_s, token_count(prompt, file, line, LENGTHS[0]), token_count(output, file, line, LENGTHS[1]))


def read_lengths(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows of a length-only file; all at 0, the caller lays an arrival process over them."""
    _name_class(file, report)
    for line, (prompt, output) in file.csv_records(LENGTHS):
        yield TraceRow(0.0, token_count(prompt, file, line, LENGTHS[0]), token_count(output, file, line, LENGTHS[1]))


def _recognise_lengths(head: TraceHead) -> bool:
    return set(LENGTHS) <= set(head.columns) and "arrived_at" not in head.columns


READER = Reader("vidur", "seconds", COLUMNS, read, lambda head: set(COLUMNS) <= set(head.columns))
LENGTHS_READER = Reader("vidur-lengths", "no times", LENGTHS, read_lengths, _recognise_lengths, needs_arrival=True)
