"""What the gateway counts, as Prometheus reads it: its own names (`ballast_…`) and vLLM's (`vllm:…`), so that present dashboards work.

Counting is a few additions to plain numbers on the event loop; names and labels are put on when somebody scrapes. No label takes its value
from a caller: models are those served, reasons and states those known, everything else is `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from envs.domain.requests import SERVICE_CLASSES
from runtime.calls import REFUSAL_STATUS
from runtime.gateway.interface import GroupStatus, ServedModel
from runtime.request_notes import RequestNotes

REASONS = frozenset(
    (*REFUSAL_STATUS, "unauthorised", "too_large", "too_slow", "answer_cut", "answer_ended_early", "internal_error", "not_found")
)
FINISHED_REASONS = ("stop", "length", "abort", "error")
MODELS_MAX = 256
GROUPS_MAX = 1024

TTFT_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
GAP_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0)
E2E_BOUNDS_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 600.0)
TOKEN_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
HOST_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Spread:
    """A histogram in the making."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, together: int = 1) -> None:
        """together: so many values, all but the first 0."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        if together > 1:
            self.counts[0] += together - 1

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it), as Prometheus wants them."""
        below, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            buckets.append((bound, float(below)))
        return buckets


@dataclass(slots=True)
class ModelCounts:
    """One model's answers. ttft, gap, e2e: by class index."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISHED_REASONS, 0))
    ttft: tuple[Spread, ...] = field(default_factory=lambda: tuple(Spread(TTFT_BOUNDS_S) for _ in SERVICE_CLASSES))
    gap: tuple[Spread, ...] = field(default_factory=lambda: tuple(Spread(GAP_BOUNDS_S) for _ in SERVICE_CLASSES))
    e2e: tuple[Spread, ...] = field(default_factory=lambda: tuple(Spread(E2E_BOUNDS_S) for _ in SERVICE_CLASSES))
    queue: Spread = field(default_factory=lambda: Spread(E2E_BOUNDS_S))
    prefill: Spread = field(default_factory=lambda: Spread(E2E_BOUNDS_S))
    decode: Spread = field(default_factory=lambda: Spread(E2E_BOUNDS_S))
    inference: Spread = field(default_factory=lambda: Spread(E2E_BOUNDS_S))
    prompt_spread: Spread = field(default_factory=lambda: Spread(TOKEN_BOUNDS))
    output_spread: Spread = field(default_factory=lambda: Spread(TOKEN_BOUNDS))

    def answered(self, class_index: int, prompt_tokens: int, output_tokens: int, finish_reasons: Iterable[str], took_s: float) -> None:
        """A request came to its answer's end, took_s after its arrival."""
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.prompt_spread.add(prompt_tokens)
        self.output_spread.add(output_tokens)
        for reason in finish_reasons:
            self.finished["length" if reason == "length" else "stop"] += 1
        self.e2e[class_index].add(took_s)


class Metrics(Collector):
    """The counters, and the registry that other parts may add their own collectors to."""

    def __init__(
        self,
        version: str,
        models: Callable[[], Mapping[str, ServedModel]],
        status: Callable[[], Sequence[GroupStatus]],
        *,
        has_old_names: bool = True,
    ) -> None:
        self._version, self._models, self._status, self._has_old_names = version, models, status, has_old_names
        self.requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.refusals: defaultdict[str, int] = defaultdict(int)
        self.in_flight = 0
        self.body_bytes_in_flight = 0
        self.departures = 0
        self.broken_streams = 0
        self.prompt_making = Spread(HOST_BOUNDS_S)
        self._of_model: dict[str, ModelCounts] = {}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def of_model(self, model: str) -> ModelCounts:
        """Counts of a model that is served; beyond MODELS_MAX they share one row."""
        known = self._of_model.get(model)
        if known is None:
            name = model if len(self._of_model) < MODELS_MAX else "other"
            known = self._of_model.setdefault(name, ModelCounts())
        return known

    def count_request(self, endpoint: str, status: int) -> None:
        self.requests[endpoint, status] += 1

    def count_refusal(self, reason: str) -> None:
        self.refusals[reason if reason in REASONS else "other"] += 1

    def take_notes(self, notes: RequestNotes) -> None:
        """Where the time of a request's answers went, as their groups told it; of those that failed in one, the last attempt's."""
        for call in notes.calls:
            times = call.attempts[-1].times if call.attempts else None
            if times is not None:
                counts = self.of_model(notes.model)
                held_s = sum(attempt.placed_s - attempt.asked_s for attempt in call.attempts)
                counts.queue.add(held_s + times.queue_s)
                counts.prefill.add(times.prefill_s)
                counts.decode.add(times.decode_s)
                counts.inference.add(times.prefill_s + times.decode_s)

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._own()
        yield from self._of_groups()
        yield from self._vllm()

    def _own(self) -> Iterator[Metric]:
        yield _gauge("ballast_build_info", "Always 1; the label tells the version.", ("version",), [((self._version,), 1.0)])
        rows = [((endpoint, str(status)), float(count)) for (endpoint, status), count in self.requests.items()]
        yield _counter("ballast_http_requests", "HTTP requests answered.", ("endpoint", "status"), rows)
        yield _counter(
            "ballast_refusals", "Requests not served, by reason.", ("reason",), [((r,), float(n)) for r, n in self.refusals.items()]
        )
        yield _counter("ballast_client_departures", "Clients that left before their answer was whole.", (), [((), float(self.departures))])
        yield _counter("ballast_broken_streams", "Streams that ended in an error event.", (), [((), float(self.broken_streams))])
        yield _gauge("ballast_requests_in_flight", "Requests being served.", (), [((), float(self.in_flight))])
        yield _gauge("ballast_body_bytes_in_flight", "Bytes of their bodies.", (), [((), float(self.body_bytes_in_flight))])
        yield _histogram(
            "ballast_prompt_making_seconds", "Body to token ids, waiting for a thread included.", (), [((), self.prompt_making)]
        )
        for name, said, which in (
            ("ballast_ttft_seconds", "Arrival to first text at the caller, by class.", "ttft"),
            ("ballast_token_gap_seconds", "Between two tokens of an answer, by class.", "gap"),
            ("ballast_e2e_seconds", "Arrival to last token, by class.", "e2e"),
        ):
            rows_of_class = [
                ((model, service.name), spread)
                for model, counts in self._of_model.items()
                for service, spread in zip(SERVICE_CLASSES, getattr(counts, which), strict=True)
            ]
            yield _histogram(name, said, ("model_name", "service_class"), rows_of_class)

    def _of_groups(self) -> Iterator[Metric]:
        groups = list(self._status())[:GROUPS_MAX]
        names = ("group", "model_name")
        for name, said, value in (
            ("ballast_group_serving", "1 where the group would be given a call.", lambda g: float(g.is_serving)),
            ("ballast_group_running", "Answers being made.", lambda g: float(g.running)),
            ("ballast_group_waiting", "Answers waiting.", lambda g: float(g.waiting)),
            ("ballast_group_kv_used_fraction", "Share of the KV memory in use, 0 to 1.", lambda g: g.kv_used_fraction),
        ):
            rows = [((group.name, group.model_id), value(group)) for group in groups]
            yield _gauge(name, said, names, [(labels, number) for labels, number in rows if number is not None])

    def _vllm(self) -> Iterator[Metric]:
        groups = list(enumerate(self._status()))[:GROUPS_MAX]
        names = ("model_name", "engine")
        kv_names = ("vllm:kv_cache_usage_perc", *(("vllm:gpu_cache_usage_perc",) if self._has_old_names else ()))
        gauges: list[tuple[str, str, Callable[[GroupStatus], float | None]]] = [
            ("vllm:num_requests_running", "Answers being made.", lambda g: float(g.running)),
            ("vllm:num_requests_waiting", "Answers waiting.", lambda g: float(g.waiting)),
        ]
        gauges += [(name, "Share of the KV memory in use, 0 to 1.", lambda g: g.kv_used_fraction) for name in kv_names]
        for name, said, value in gauges:
            rows = [((group.model_id, str(place)), value(group)) for place, group in groups]
            yield _gauge(name, said, names, [(labels, number) for labels, number in rows if number is not None])
        for name, said, which in (
            ("vllm:num_preemptions", "Answers put back for want of memory.", "preemptions"),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
            ("vllm:prefix_cache_hits", "Prompt tokens found there.", "prefix_hit_tokens"),
        ):
            counted = [((group.model_id, str(place)), getattr(group, which)) for place, group in groups]
            yield _counter(name, said, names, [(labels, float(number)) for labels, number in counted if number is not None])
        yield from self._vllm_answers()

    def _vllm_answers(self) -> Iterator[Metric]:
        """Counted at the gateway, over all groups of a model: `engine` is `gateway`."""
        names, counts = ("model_name", "engine"), self._of_model.items()
        yield _counter("vllm:prompt_tokens", "Prompt tokens.", names, [((m, "gateway"), float(c.prompt_tokens)) for m, c in counts])
        yield _counter("vllm:generation_tokens", "Answer tokens.", names, [((m, "gateway"), float(c.output_tokens)) for m, c in counts])
        rows = [((m, "gateway", reason), float(number)) for m, c in counts for reason, number in c.finished.items()]
        yield _counter("vllm:request_success", "Answers by how they ended.", (*names, "finished_reason"), rows)
        gap_names = ("vllm:inter_token_latency_seconds", *(("vllm:time_per_output_token_seconds",) if self._has_old_names else ()))
        for name, said, which in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", "ttft"),
            *((name, "Between two tokens of an answer.", "gap") for name in gap_names),
            ("vllm:e2e_request_latency_seconds", "Arrival to last token.", "e2e"),
        ):
            yield _histogram(name, said, names, [((m, "gateway"), _sum(getattr(c, which))) for m, c in counts])
        for part, said in (
            ("queue", "Waiting for a group, and in one."),
            ("prefill", "Admission to first token."),
            ("decode", "First token to last."),
            ("inference", "Admission to last token."),
        ):
            yield _histogram(f"vllm:request_{part}_time_seconds", said, names, [((m, "gateway"), getattr(c, part)) for m, c in counts])
        yield _histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", names, [((m, "gateway"), c.prompt_spread) for m, c in counts]
        )
        yield _histogram(
            "vllm:request_generation_tokens", "Answer tokens of a request.", names, [((m, "gateway"), c.output_spread) for m, c in counts]
        )


Labels = tuple[str, ...]


def _sum(spreads: Sequence[Spread]) -> Spread:
    total = Spread(spreads[0].bounds)
    total.counts = [sum(counts) for counts in zip(*(spread.counts for spread in spreads), strict=True)]
    total.total = sum(spread.total for spread in spreads)
    return total


def _gauge(name: str, said: str, names: Labels, rows: Iterable[tuple[Labels, float]]) -> Metric:
    family = GaugeMetricFamily(name, said, labels=names)
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _counter(name: str, said: str, names: Labels, rows: Iterable[tuple[Labels, float]]) -> Metric:
    family = CounterMetricFamily(name, said, labels=names)
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _histogram(name: str, said: str, names: Labels, rows: Iterable[tuple[Labels, Spread]]) -> Metric:
    family = HistogramMetricFamily(name, said, labels=names)
    for labels, spread in rows:
        family.add_metric(labels, spread.buckets(), spread.total)
    return family
