"""Drawing request rows from ServeGen's parameters, window by window, so that memory holds one window only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from envs.traces.arrivals import stationary_arrivals_s
from envs.traces.formats.reader import Reader
from envs.traces.formats.servegen_parameters import (
    PROMPT_FIELDS,
    RATE_WINDOW_S,
    ClientParameters,
    Histogram,
    RateWindow,
    histogram_of,
    load_clients,
)
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile
from envs.traces.trace_row import ReadReport, TraceError, TraceRow

FloatArray = npt.NDArray[np.float64]


class _LengthSource:
    """Length histograms per client, parsed once per length window; a client without any borrows another's."""

    def __init__(self, clients: list[ClientParameters], file: TraceFile, rng: np.random.Generator) -> None:
        lenders = [client for client in clients if client.lengths]
        if not lenders:
            raise file.error("holds no chunk-<client>-dataset.json with lengths; rows cannot be drawn")
        self._file = file
        # The choice of lender is drawn once per client, so that a client keeps its character over time.
        self._owner = {client.name: client if client.lengths else lenders[int(rng.integers(len(lenders)))] for client in clients}
        self.borrowers = [client.name for client in clients if not client.lengths and client.windows]
        self._parsed: dict[tuple[str, int], dict[str, Histogram]] = {}

    def draw(self, client: ClientParameters, time_s: float, size: int, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
        """Prompt and output tokens, shape (size,); the file gives marginals, so the two are drawn apart."""
        owner = self._owner[client.name]
        fields = owner.lengths_at(time_s)
        assert fields is not None
        key = (owner.name, id(fields))
        if key not in self._parsed:
            names = [name for name in (*PROMPT_FIELDS, "output_tokens") if fields.get(name)]
            self._parsed[key] = {name: histogram_of(fields[name], self._file) for name in names}
        drawn = {name: histogram.draw(size, rng) for name, histogram in self._parsed[key].items()}
        output = drawn.pop("output_tokens")
        if not drawn:
            raise self._file.error(f"client {owner.name} has output lengths but none of {', '.join(PROMPT_FIELDS)}")
        return sum(drawn.values(), np.zeros(size)), output


def _window_rows(
    busy: list[tuple[ClientParameters, RateWindow]],
    span: tuple[float, float],
    lengths: _LengthSource,
    options: ReadOptions,
    rng: np.random.Generator,
) -> Iterator[TraceRow]:
    """All clients' rows of one rate window, in time order; `span` is the part of it that was asked for."""
    times, prompts, outputs, owners = [], [], [], []
    for client, window in busy:
        arrival_s = stationary_arrivals_s(window.process, window.shape, window.rate_per_s * options.rate_scale, *span, rng)
        prompt, output = lengths.draw(client, window.start_s, arrival_s.size, rng)
        times.append(arrival_s)
        prompts.append(prompt)
        outputs.append(output)
        owners += [client.name] * arrival_s.size
    if not times:
        return
    time = np.concatenate(times)
    prompt_all, output_all = np.concatenate(prompts), np.concatenate(outputs)
    for i in np.argsort(time, kind="stable"):
        arrival = float(time[i]) - options.window_start_s
        yield TraceRow(arrival, round(prompt_all[i]), round(output_all[i]), session=f"client-{owners[i]}")


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows of [window_start_s, window_start_s + duration_s) of the published windows, re-based to 0.

    Each window's mean count is its published rate x span; its published shape sets the burstiness. Sessions are clients.
    """
    if options.duration_s is None:
        raise TraceError(f"{file.path}: ServeGen files hold rates, not rows; say how much to draw, e.g. --duration-s 600")
    start_s, end_s = options.window_start_s, options.window_start_s + options.duration_s
    lengths_rng, rows_rng = np.random.default_rng(options.seed).spawn(2)
    clients = load_clients(file, start_s, end_s)
    lengths = _LengthSource(clients, file, lengths_rng)
    report.note(f"rows are drawn (seed {options.seed}), not recorded: {len(clients)} clients, window {start_s:g} to {end_s:g} s")
    if lengths.borrowers:
        report.note(f"{len(lengths.borrowers)} clients have no length file and borrow another client's")
    by_start: dict[float, list[tuple[ClientParameters, RateWindow]]] = {}
    for client in clients:
        for window in client.windows:
            by_start.setdefault(window.start_s, []).append((client, window))
    if not by_start:
        raise TraceError(f"{file.path}: no traffic in {start_s:g} to {end_s:g} s; choose another --window-start-s or --duration-s")
    for window_s in sorted(by_start):
        span = (max(start_s, window_s), min(end_s, window_s + RATE_WINDOW_S))
        yield from _window_rows(by_start[window_s], span, lengths, options, rows_rng)


READER = Reader("servegen", "seconds", ("chunk-<client>-trace.csv", "chunk-<client>-dataset.json"), read, lambda head: False)
