"""Opening a trace as a stream of rows: recognising its format, and the rules that hold for every format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from envs.domain.suggestions import unknown_name
from envs.traces.formats import READERS
from envs.traces.formats.reader import Reader
from envs.traces.formats.servegen_parameters import is_servegen
from envs.traces.read_options import ReadOptions, options_from
from envs.traces.trace_file import TraceFile, TraceHead, columns_message
from envs.traces.trace_row import ReadReport, TraceError, TraceRow


class TraceStream:
    """Rows of one trace, in file order, and the report about them. Iterate it once; memory stays bounded.

    Rows with a prompt or an output of 0 tokens or less are left out and counted (`keep_zero_output` keeps the latter as
    one token). Arrivals may step back where the file is unordered, below 0 even; a table sorts and shifts them.
    """

    def __init__(self, file: TraceFile, reader: Reader, options: ReadOptions) -> None:
        self.options = options
        self.format = reader.name
        self.report = ReadReport(str(file.path), reader.name, reader.default_class)
        if options.service_class is not None:
            self.report.note(f"class {options.service_class!r} of all rows by choice of the caller")
        if reader.needs_arrival and options.arrival is None:
            what = "arrivals on a clock per session only" if reader.places_sessions else "no arrival times"
            raise file.error(f"has {what} (format {reader.name}); make them up, e.g. --rate 2 --burstiness 1")
        self._wanted = reader.wanted
        self._file = file
        rows = self._served(reader.read(file, options, self.report))
        if options.arrival is not None and not reader.places_sessions:
            rows = self._with_made_up_arrivals(rows)
        if options.spread_ticks_s is not None:
            rows = self._spread(rows, options.spread_ticks_s)
        if options.arrival is not None:
            kind = "session starts" if reader.places_sessions else "arrivals"
            self.report.note(
                f"{kind} are made up: gamma renewal, {options.arrival.rate_per_s:g} a second, "
                f"shape {options.arrival.burstiness:g}, seed {options.seed}"
            )
        self._rows = self._counted(rows)

    def __iter__(self) -> Iterator[TraceRow]:
        return self._rows

    def _served(self, rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
        left_out = self.report.left_out
        keep, label = self.options.keep_zero_output, self.options.service_class
        for row in rows:
            if row.prompt_tokens <= 0:
                left_out["prompt of 0 tokens or less"] += 1
                continue
            if row.output_tokens <= 0:
                if not keep:
                    left_out["output of 0 tokens or less (a failed request)"] += 1
                    continue
                self.report.kept_as_one_token += 1
                row = replace(row, output_tokens=1)
            yield row if label is None else replace(row, service_class=label)

    def _with_made_up_arrivals(self, rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
        assert self.options.arrival is not None
        times_s = self.options.arrival.arrivals_s(np.random.default_rng(self.options.seed))
        for row, arrival_s in zip(rows, times_s, strict=False):
            yield replace(row, arrival_s=arrival_s)

    def _spread(self, rows: Iterator[TraceRow], tick_s: float) -> Iterator[TraceRow]:
        """Give the rows that share a stamp sorted uniform times within `tick_s` after it, so file order stays."""
        rng = np.random.default_rng([self.options.seed, 1])
        self.report.note(f"requests of one stamp are spread uniformly over the {tick_s:g} s after it, seed {self.options.seed}")
        tied: list[TraceRow] = []
        for row in rows:
            if tied and row.arrival_s != tied[0].arrival_s:
                yield from _spread_tied(tied, tick_s, rng)
                tied = []
            tied.append(row)
        yield from _spread_tied(tied, tick_s, rng)

    def _counted(self, rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
        """Count rows and steps back in time; a trace without a single row is an error, not a quiet empty run."""
        report = self.report
        last_s = -np.inf
        for row in rows:
            report.rows += 1
            if row.arrival_s < last_s:
                report.rows_out_of_order += 1
            else:
                last_s = row.arrival_s
            yield row
        if report.rows == 0:
            why = f" ({report.rows_left_out} left out: {', '.join(report.left_out)})" if report.left_out else ""
            raise self._file.error(
                f"holds no usable row{why}; columns wanted: {', '.join(self._wanted)}; columns found: {_found(self._file)}; check the file"
            )


def _spread_tied(tied: list[TraceRow], tick_s: float, rng: np.random.Generator) -> Iterator[TraceRow]:
    for row, offset_s in zip(tied, np.sort(rng.random(len(tied)) * tick_s).tolist(), strict=True):
        yield replace(row, arrival_s=row.arrival_s + offset_s)


def _found(file: TraceFile) -> str:
    """Names found in the file, in its own order."""
    if file.path.is_dir():
        return "none"
    head = file.head()
    return ", ".join(map(str, head.first if isinstance(head.first, dict) else head.columns)) or "none"


def open_trace(path: str | Path, format: str | None = None, options: ReadOptions | None = None, **choices: object) -> TraceStream:
    """Open `path` for one pass over its rows; `choices` are the fields of ReadOptions.

    format: a name of READERS; None recognises it from the content. Raises TraceError (one line) when the file is
    absent, empty, a folder, of no known format, or needs a choice that was not made. Faults deeper in the file raise
    while iterating.
    """
    if choices:
        if options is not None:
            raise TraceError("give ReadOptions or single choices, not both")
        options = options_from(choices)
    options = options or ReadOptions()
    file = TraceFile(Path(path))
    if format is not None and format not in READERS:
        raise TraceError(unknown_name("trace format", format, READERS))
    reader = READERS[format] if format is not None else recognise(file, options)
    if not (file.path.is_dir() and reader.name in ("servegen", "weka")):
        file.check_readable()
    return TraceStream(file, reader, options)


def recognise(file: TraceFile, options: ReadOptions | None = None) -> Reader:
    """The reader of a file, told by its content alone; raises TraceError naming the nearest format's columns."""
    if is_servegen(file.path):
        return READERS["servegen"]
    if file.path.is_dir() and (first := next(iter(sorted(file.path.glob("*.json"))), None)) is not None:
        inner = TraceFile(first)
        if READERS["weka"].recognise(inner.head()):
            return READERS["weka"]
    head = file.head()
    if options is not None and options.columns:
        return READERS["columns"]
    for reader in READERS.values():
        if reader.recognise(head):
            return reader
    raise _unrecognised(file, head)


def _unrecognised(file: TraceFile, head: TraceHead) -> TraceError:
    if {"timestamp", "input_length", "output_length"} <= head.keys:
        return file.error("could be AIPerf (milliseconds) or GuideLLM (seconds); say which: --format aiperf or --format guidellm")
    scores = {name: len(head.keys & set(reader.wanted)) for name, reader in READERS.items()}
    nearest = max(scores, key=lambda name: scores[name])
    found = tuple(map(str, head.first)) if isinstance(head.first, dict) else head.columns
    if scores[nearest] == 0:
        shown = ", ".join(found)[:120] or "none"
        return file.error(f"is of no known format; columns found: {shown}; name columns (--columns) or a format: {', '.join(READERS)}")
    wanted = READERS[nearest].wanted
    missing = [name for name in wanted if name not in head.keys]
    return file.error(f"nearest format is {nearest}; {columns_message(missing, wanted, found)}")
