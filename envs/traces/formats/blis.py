"""inference-sim (BLIS) workload specifications (YAML, requests/s and microseconds): rows are drawn from them.

Source: inference-sim docs/reference/workload-spec.md. Read: clients and cohorts with arrivals, lengths, prefix groups,
lifecycle windows, diurnal, spike and drain. Refused by name: servegen_data, inference_perf, multimodal, reasoning.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.domain.suggestions import unknown_name
from envs.traces.arrivals import PROCESSES, stationary_arrivals_s, weibull_shape_of_cv
from envs.traces.formats.blis_activity import US, rate_level, silent_after_s
from envs.traces.formats.blis_lengths import LengthDistribution, length_distribution
from envs.traces.formats.reader import Reader
from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceError, TraceRow

WANTED = ("aggregate_rate", "clients or cohorts")
BLOCK_TOKENS = 16
CHUNK_S = 60.0
CLASS_OF_SLO = {
    "critical": ("chat", 2),
    "standard": ("chat", 1),
    "sheddable": ("chat", 0),
    "batch": ("batch", 0),
    "background": ("batch", 0),
}
REFUSED = ("servegen_data", "inference_perf")
REFUSED_IN_CLIENT = ("multimodal", "reasoning")


@dataclass(frozen=True, slots=True)
class _Client:
    name: str
    slo_class: str
    rate_per_s: float
    process: str
    shape: float
    prompt: LengthDistribution
    output: LengthDistribution
    prefix_group: str | None
    prefix_tokens: int
    level: Callable[[float], float]  # share of the full rate at a time, 0 to 1
    last_s: float  # no request comes after it


def _shape(arrival: Any, where: str) -> tuple[str, float]:
    process = str((arrival or {}).get("process", "")) if isinstance(arrival, dict | None) else ""
    if process not in PROCESSES:
        raise TraceError(unknown_name(f"{where}: arrival process", process, PROCESSES))
    if process not in ("gamma", "weibull"):
        return process, 1.0
    cv = arrival.get("cv")
    if not isinstance(cv, int | float) or not (cv > 0 and math.isfinite(cv)):
        raise TraceError(f"{where}: cv={cv!r} must be a positive number for {process}")
    return process, 1.0 / cv**2 if process == "gamma" else weibull_shape_of_cv(float(cv))


def _client(entry: Any, name: str, population: int, aggregate_rate: float, file: TraceFile) -> _Client:
    where = f"{file.path}: client {name}"
    if not isinstance(entry, dict):
        raise TraceError(f"{where}: expected a mapping, found {entry!r}")
    for key in REFUSED_IN_CLIENT:
        if entry.get(key):
            raise TraceError(f"{where}: {key} is not drawn here; take it out, or let inference-sim write rows and read those")
    fraction = entry.get("rate_fraction")
    if not isinstance(fraction, int | float) or not fraction > 0:
        raise TraceError(f"{where}: rate_fraction={fraction!r} must be a positive number")
    process, shape = _shape(entry.get("arrival"), where)
    try:
        level, last_s = rate_level(entry), silent_after_s(entry)
        level(0.0)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as fault:
        raise TraceError(f"{where}: lifecycle, diurnal, spike or drain cannot be read ({fault!r})") from fault
    return _Client(
        name,
        str(entry.get("slo_class") or "standard"),
        float(fraction) * aggregate_rate * population,
        process if population == 1 else "poisson",
        shape,
        length_distribution(entry.get("input_distribution"), f"{where}: input_distribution"),
        length_distribution(entry.get("output_distribution"), f"{where}: output_distribution"),
        entry.get("prefix_group"),
        int(entry.get("prefix_length") or 0) if entry.get("prefix_group") else 0,
        level,
        last_s,
    )


def _clients(document: dict[str, Any], file: TraceFile, rate_scale: float) -> list[_Client]:
    rate = document.get("aggregate_rate")
    if not isinstance(rate, int | float) or not rate > 0:
        raise file.error(f"aggregate_rate={rate!r} must be a positive number of requests/s")
    for key in REFUSED:
        if document.get(key):
            raise file.error(f"{key} is not drawn here; read that data set itself (format servegen), or list clients")
    rate = float(rate) * rate_scale
    clients = [_client(entry, str((entry or {}).get("id", i)), 1, rate, file) for i, entry in enumerate(document.get("clients") or [])]
    for i, entry in enumerate(document.get("cohorts") or []):
        population = entry.get("population") if isinstance(entry, dict) else None
        if not isinstance(population, int) or not 1 <= population <= 100_000:
            raise file.error(f"cohort {i}: population={population!r} must be 1 to 100000")
        clients.append(_client(entry, str(entry.get("id", f"cohort-{i}")), population, rate, file))
    if not clients:
        raise file.error(f"lists no clients; columns wanted: {', '.join(WANTED)}; columns found: {', '.join(map(str, document))}")
    return clients


def _rows(client: _Client, prefix: tuple[int, ...], end_s: float, rng: np.random.Generator) -> Iterator[TraceRow]:
    """Rows of one client in time order, drawn a minute at a time and thinned to the rate of the moment."""
    service_class, priority = CLASS_OF_SLO.get(client.slo_class, (client.slo_class, None))
    start_s, end_s = 0.0, min(end_s, client.last_s)
    while start_s < end_s:
        stop_s = min(end_s, start_s + CHUNK_S)
        times = stationary_arrivals_s(client.process, client.shape, client.rate_per_s, start_s, stop_s, rng)
        kept = times[rng.random(times.size) < np.array([client.level(time) for time in times.tolist()])] if times.size else times
        prompts = client.prompt.draw(kept.size, rng) + client.prefix_tokens
        outputs = client.output.draw(kept.size, rng)
        for time, prompt, output in zip(kept.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
            yield TraceRow(
                time,
                int(prompt),
                int(output),
                service_class,
                priority,
                f"client-{client.name}",
                prefix,
                BLOCK_TOKENS if prefix else 0,
            )
        start_s = stop_s


def read(file: TraceFile, options: ReadOptions, report: ReadReport) -> Iterator[TraceRow]:
    """Yield rows until `num_requests`, `horizon` (microseconds) or `options.duration_s`, whichever comes first."""
    import yaml  # only needed for this format

    with file.text() as text:
        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as fault:
            raise file.error(f"is no valid YAML ({' '.join(str(fault).split())[:200]})") from fault
    if not isinstance(document, dict):
        raise file.error(f"holds a {type(document).__name__}, expected a workload; columns wanted: {', '.join(WANTED)}")
    clients = _clients(document, file, options.rate_scale)
    count = int(document.get("num_requests") or 0)
    horizon_s = float(document["horizon"]) * US if document.get("horizon") else math.inf
    end_s = min(horizon_s, options.duration_s or math.inf)
    if not count and not math.isfinite(end_s):
        raise file.error("has neither num_requests nor horizon; say how much to draw, e.g. --duration-s 600")
    report.note(f"rows are drawn (seed {options.seed}), not recorded; a cohort of several clients is drawn as one Poisson stream")
    groups = sorted({client.prefix_group for client in clients if client.prefix_group})
    streams = []
    for client, rng in zip(clients, np.random.default_rng(options.seed).spawn(len(clients)), strict=True):
        base = groups.index(client.prefix_group) * 1_000_000 if client.prefix_group else 0
        prefix = tuple(range(base, base + client.prefix_tokens // BLOCK_TOKENS))
        streams.append(_rows(client, prefix, end_s, rng))
    for number, row in enumerate(heapq.merge(*streams, key=lambda row: row.arrival_s), start=1):
        yield row
        if number == count:
            return


def _recognise(head: TraceHead) -> bool:
    return not isinstance(head.first, dict) and "aggregate_rate:" in head.text


READER = Reader("blis", "microseconds", WANTED, read, _recognise)
