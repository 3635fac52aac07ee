"""Draws worlds: a slice of a trace window at a rate scale, on a cluster, with random faults. Windows of training,
validation and test never overlap in time, so no world of one shares a request with a world of another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from envs.cluster.faults import FaultEvent, FaultKind, FaultRates
from envs.cluster.world import WorldOptions, WorldSpec
from envs.scenario.cluster_spec import ClusterSpec
from envs.traces.trace_table import TraceTable


def first_rows(trace: TraceTable, begin: int, count: int) -> TraceTable:
    """Requests begin .. begin + count - 1, re-based so that the first arrives at 0 s; block ids renumbered from 0."""
    part = trace.take(np.arange(begin, begin + count))
    _, ids = np.unique(part.prefix_ids, return_inverse=True)
    return replace(part, arrival_s=part.arrival_s - part.arrival_s[0], prefix_ids=ids.astype(np.int64))


def scripted_faults(cluster: ClusterSpec) -> tuple[FaultEvent, ...]:
    """The faults that the cluster file scripts, for the simulated world; they strike besides the random ones."""
    return tuple(
        FaultEvent(FaultKind[fault.kind.upper()], fault.start_s, fault.length_s, fault.group_index, fault.rank_index, fault.size)
        for fault in cluster.faults
    )


@dataclass(frozen=True, slots=True)
class WorldSampler:
    """Callable: Generator -> WorldSpec.

    window_s: (start, end) in the trace's own time; requests: length of a world; rate_scales: log-uniform range of
    time compression (2 = arrivals twice as fast); fault_factors: range of the multiplier on `fault_rates`; report_delays_s:
    range of how old the groups' reports are, None: as `options` say.
    """

    trace: TraceTable
    window_s: tuple[float, float]
    clusters: tuple[ClusterSpec, ...]
    requests: int
    rate_scales: tuple[float, float]
    options: WorldOptions = field(default_factory=WorldOptions)
    fault_rates: FaultRates | None = field(default_factory=FaultRates)
    fault_factors: tuple[float, float] = (0.0, 2.0)
    report_delays_s: tuple[float, float] | None = None
    name: str = "world"

    def __call__(self, rng: np.random.Generator) -> WorldSpec:
        """One world; what is drawn comes from child streams, so that adding a fault never moves an arrival."""
        slice_rng, rate_rng, cluster_rng, fault_rng, seed_rng, delay_rng = rng.spawn(6)
        first, last = np.searchsorted(self.trace.arrival_s, self.window_s)
        if last - first < 2:
            raise ValueError(f"trace window {self.window_s} s holds {last - first} requests; choose a longer window")
        count = min(self.requests, int(last - first))
        begin = int(first) + int(slice_rng.integers(0, int(last - first) - count + 1))
        table = first_rows(self.trace, begin, count)
        scale = float(np.exp(rate_rng.uniform(*np.log(self.rate_scales))))
        table = table.compress(scale)
        rates = None
        if self.fault_rates is not None:
            rates = self.fault_rates.scaled(float(fault_rng.uniform(*self.fault_factors)))
        seed = int(seed_rng.integers(2**62))
        cluster = self.clusters[int(cluster_rng.integers(len(self.clusters)))]
        name = f"{self.name}@{begin}x{scale:.2f}"
        options = self.options
        if self.report_delays_s is not None:
            options = replace(options, report_delay_s=float(delay_rng.uniform(*self.report_delays_s)))
        return WorldSpec(cluster, table, seed, options, scripted_faults(cluster), rates, name)

    def fixed(self, count: int, seed: int) -> tuple[WorldSpec, ...]:
        """`count` worlds that are the same for everybody who asks with `seed` (paired evaluation)."""
        streams = np.random.SeedSequence(seed).spawn(count)
        return tuple(self(np.random.default_rng(stream)) for stream in streams)

    def at_rate(self, scale: float) -> WorldSampler:
        """The same sampler with one rate scale."""
        return replace(self, rate_scales=(scale, scale))
