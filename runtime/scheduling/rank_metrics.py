"""What groups and ranks really do with their time and memory, for Prometheus: by utilisation alone, a card that waits for its host or for
its slowest neighbour looks busy."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from envs.decision.split_planner import CORNERS
from envs.group_kernel import reading as R
from envs.perf_model import memory_fit
from runtime.scheduling.dispatcher import Dispatcher

GAUGES = {
    "ballast_group_effective_compute_share": "Share of the last seconds in which the group's busiest rank computed.",
    "ballast_group_memory_bytes_per_second": "Weights and KV read per second, all ranks.",
    "ballast_group_kv_tokens_used": "Tokens in the KV pool.",
    "ballast_group_kv_tokens_limit": "Tokens that the KV pool holds.",
}
RANK_GAUGES = {
    "ballast_rank_compute_share": "Share of the last seconds in which the rank computed.",
    "ballast_rank_memory_stall_share": "Share of the last seconds in which it waited for memory.",
    "ballast_rank_memory_bytes_per_second": "Weights and KV that it read per second.",
    "ballast_rank_busy_fraction": "Its time in a usual step, of the slowest rank's.",
    "ballast_rank_speed_factor": "Measured / declared speed; 0 when lost.",
    "ballast_rank_kv_bytes_used": "Bytes of KV on it.",
    "ballast_rank_split_fraction": "Its share of the MLP columns.",
}
RANK_COUNTERS = {
    "ballast_rank_compute_seconds": "Time that the rank computed, since its group's start.",
    "ballast_rank_memory_stall_seconds": "Time that it waited for memory, since its group's start.",
}


class RankMetrics(Collector):
    """Read when somebody scrapes. Labels are the cluster file's groups, ranks by number, and known corners. What a group's kind does not
    tell is absent, never 0."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        gauges = {name: GaugeMetricFamily(name, said, labels=("group",)) for name, said in GAUGES.items()}
        ranks = {name: GaugeMetricFamily(name, said, labels=("group", "rank")) for name, said in RANK_GAUGES.items()}
        counters = {name: CounterMetricFamily(name, said, labels=("group", "rank")) for name, said in RANK_COUNTERS.items()}
        corner = GaugeMetricFamily("ballast_group_plan_corner", "1 for the split that new calls get.", labels=("group", "corner"))
        for g, backend in enumerate(self._dispatcher.backends):
            for name, value in self._of_group(g).items():
                gauges[name].add_metric((backend.name,), value)
            for name, values in self._of_ranks(g).items():
                family = ranks[name] if name in ranks else counters[name]
                for rank, value in enumerate(values):
                    family.add_metric((backend.name, str(rank)), float(value))
            chosen = self._dispatcher.telemetry.corner(g)
            if backend.can and g not in self._dispatcher.telemetry.joined:
                corner.add_metric((backend.name, CORNERS[chosen] if 0 <= chosen < len(CORNERS) else "none"), 1.0)
        yield from (*gauges.values(), *ranks.values(), *counters.values(), corner)

    def _of_group(self, g: int) -> dict[str, float]:
        rates, view = self._dispatcher.plans.rates[g], self._dispatcher.view()
        found: dict[str, float] = {}
        if rates is not None:
            found["ballast_group_effective_compute_share"] = float(rates.compute.max(initial=0.0))
            found["ballast_group_memory_bytes_per_second"] = rates.bytes_per_s
        if self._dispatcher.backends[g].can and g not in self._dispatcher.telemetry.joined:
            total = int(view.kv_blocks_total[g])
            found["ballast_group_kv_tokens_used"] = float((total - int(view.kv_blocks_free[g])) * view.kv_block_tokens)
            found["ballast_group_kv_tokens_limit"] = float(total * view.kv_block_tokens)
        return found

    def _of_ranks(self, g: int) -> dict[str, list[float]]:
        dispatcher = self._dispatcher
        if not dispatcher.backends[g].can or g in dispatcher.telemetry.joined:  # another engine's are not seen from here
            return {}
        telemetry, plans, group = dispatcher.telemetry, dispatcher.plans, dispatcher.telemetry.groups[g]
        count, view, rates, report = len(group.ranks), dispatcher.view(), plans.rates[g], telemetry.reports[g]
        plan = plans.plans[g]
        weights, kv = memory_fit.weight_bytes(group.model, plan), memory_fit.kv_bytes_per_token(group.model, plan)
        used = (int(view.kv_blocks_total[g]) - int(view.kv_blocks_free[g])) * view.kv_block_tokens
        found: dict[str, list[float]] = {
            "ballast_rank_busy_fraction": view.rank_busy_fraction[g, :count].tolist(),
            "ballast_rank_speed_factor": plans.speed_factors(g).tolist(),
            "ballast_rank_kv_bytes_used": (used * kv).tolist(),
            "ballast_rank_split_fraction": [width / max(1, sum(plan.mlp_blocks)) for width in plan.mlp_blocks],
        }
        if rates is not None:
            tokens = telemetry.flights.ints_of(g)[:, [R.V_PROMPT, R.V_GENERATED]].sum()
            read = weights + tokens * kv
            found["ballast_rank_compute_share"] = rates.compute.tolist()
            found["ballast_rank_memory_stall_share"] = rates.stall.tolist()
            found["ballast_rank_memory_bytes_per_second"] = (rates.bytes_per_s * read / max(1.0, float(read.sum()))).tolist()
        if report is not None and report.work is not None:
            found["ballast_rank_compute_seconds"] = list(report.work.compute_s)
            found["ballast_rank_memory_stall_seconds"] = list(report.work.memory_stall_s)
        return found
