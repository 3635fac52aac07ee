"""Requests per CPU second of the cluster model: Llama-2-70B TP4 A100, 16 replicas, the Azure conversation trace x 4.

A is jumping over steps as shipped, B the same world with round robin and with the least-completion router, interleaved.
Vidur and splitwise-sim manage 440-600 requests per CPU second on the same work (their figures are quoted, not re-run).
Compilation is reported apart.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np

from agents import heuristics
from benchmarks.reporting import at_least, print_bars
from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.world import WorldOptions, WorldSpec
from envs.scenario.cluster_file import load_cluster
from envs.traces.default_traces import default_trace
from envs.world_sampler import first_rows

REPEATS = 5


def measure(world: WorldSpec, router: str) -> tuple[float, str, float]:
    """(CPU seconds, event digest, goodput share) of one run."""
    begin = time.process_time()
    cluster = ClusterProcess(world)
    cluster.run({"route": heuristics.make("route", router, np.random.default_rng(0))})
    used_s = time.process_time() - begin
    completed = float((cluster.outcomes.kind == 0).mean())
    return used_s, cluster.log.digest(), completed


def main() -> None:
    trace = default_trace("azure-conv").compress(4.0)
    world = WorldSpec(load_cluster("a100-70b-16"), trace, seed=1, options=WorldOptions())
    begin = time.process_time()
    measure(replace(world, trace=first_rows(trace, 0, 200)), "round_robin")
    measure(replace(world, trace=first_rows(trace, 0, 200)), "least_completion")
    compile_s = time.process_time() - begin
    requests = len(trace.arrival_s)
    runs: dict[str, list[float]] = {"round_robin": [], "least_completion": []}
    digests: dict[str, set[str]] = {name: set() for name in runs}
    for repeat in range(REPEATS):
        for router, taken in runs.items():
            used_s, digest, completed = measure(world, router)
            taken.append(requests / used_s)
            digests[router].add(digest)
            print(f"run {repeat + 1} {router}: {requests / used_s:,.0f} requests/CPU s, completed {completed:.3f}", flush=True)
    assert all(len(found) == 1 for found in digests.values()), "two runs with one seed differ"
    bars = [at_least(f"requests per CPU s, {name}", statistics.median(taken), 5000.0, REPEATS) for name, taken in runs.items()]
    print_bars(bars, trace=trace.source, synthetic=trace.synthetic, requests=requests, compile_cpu_s=round(compile_s, 1))


if __name__ == "__main__":
    main()
