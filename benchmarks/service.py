"""What the service costs a request as a router, and what is felt when the servers behind it fail: `python -m benchmarks.service`.

Drives the shared router benchmark (four scripted servers, wrk, an open loop) against the service with a policy deciding and, in turn with
it, other routers; then the drills of `benchmarks.router_drills`. Only CPU times and ratios are claims: load, servers and routers share the
machine. Without --bundle a small policy is trained for the benchmark's own cluster first, once (`benchmarks.router_policy`); the bars of
the cost hold only where the policy decided nearly all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import uvloop

from benchmarks.conditions import MachineLoad, spread
from benchmarks.reporting import Bar, at_least, at_most, print_bars
from benchmarks.router_drills import DRILLS, Drill, many_streams, run, scene
from benchmarks.router_policy import benchmark_bundle
from benchmarks.router_processes import PORTS, Backends, Gateway, Router, bench_folder, load_bench, peer

CLIENTS = 32
SLICES, SLICE_S = 6, 10
DECIDED_MIN = 0.9
"""Share of decisions that the policy must have made for the cost to be that of a service whose policy decides."""
POLICY_DECIDES: dict[str, float] = {"outside_max": 100_000, "deadline_ms": 100.0}
"""Scripted servers are like nothing that a policy was trained on, and on a machine as full as this makes it five milliseconds pass by: the
heuristic would answer, and the policy's share of the cost be left out of the figures."""
Samples = dict[tuple[str, str], list[float]]


@dataclass(frozen=True, slots=True)
class Subject:
    """A router under load. pids: of the router itself; beside: of processes that it needs (the policy's)."""

    name: str
    url: str
    pids: Sequence[int] = ()
    beside: Sequence[int] = ()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="exported route policy (default: one trained for this cluster, kept)")
    parser.add_argument("--peers", default="nginx,haproxy,vllm-router", help="routers to run beside, by their names in targets.json")
    parser.add_argument("--peer-env", type=Path, help="virtual environment that holds vllm-router==0.1.17 or sglang-router==0.3.2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4, help="of one cell")
    parser.add_argument("--long", action="store_true", help="hold the 1,024 streams for ten minutes instead of 30 s")
    parser.add_argument("--only", choices=("cost", "drills"), help="one half alone")
    parser.add_argument("--drill", action="append", choices=(*DRILLS, "many_streams"), help="this drill alone; may be repeated")
    return parser.parse_args(arguments)


def closed_loop(bench: ModuleType, subject: Subject, stream: bool, clients: int, seconds: int, samples: Samples) -> None:
    """One cell: wrk's figures and what the router's processes used, into `samples`."""
    cell = f"{'stream' if stream else 'JSON'} {clients}"
    before, beside = bench.cpu(subject.pids), bench.cpu(subject.beside)
    found = bench.wrk(subject.url, clients, stream, seconds)
    errors = sum(found[name] for name in ("e_conn", "e_read", "e_write", "e_status", "e_timeout"))
    done = max(1, found["n"] - found["e_status"])
    values = {"per_s": found["n"] / (found["us"] / 1e6), "p50_ms": found["p50"] / 1e3, "errors": errors}
    if subject.pids:
        values["cpu_us"] = (bench.cpu(subject.pids) - before) / done * 1e6
        values["beside_us"] = (bench.cpu(subject.beside) - beside) / done * 1e6
    for name, value in values.items():
        samples[subject.name, f"{cell} {name}"].append(value)
    print(f"{subject.name:12s} {cell:10s} {', '.join(f'{name} {value:.2f}' for name, value in values.items())}", flush=True)


def open_loop(bench: ModuleType, subject: Subject, seconds: int, seed: int, samples: Samples) -> None:
    """40 streams a second at random moments: time to the first token, whatever came before."""
    found = uvloop.run(bench.open_loop(subject.url, 40.0, seconds, seed=seed))
    for name in ("ttft_p50", "ttft_p99"):
        samples[subject.name, name].append(found[name])
    # not its count of short streams: it takes the chunk that tells the role for a token. Tokens are the drills' business
    samples[subject.name, "open errors"].append(sum(found["errors"].values()))


def cost(bench: ModuleType, options: argparse.Namespace, folder: Path, scratch: Path) -> tuple[list[Bar], dict[str, object]]:
    samples: Samples = defaultdict(list)
    load = MachineLoad()
    with ExitStack() as stack:
        backends = stack.enter_context(Backends(folder))
        gateway = stack.enter_context(Gateway(scratch, options.bundle, POLICY_DECIDES))
        found = [peer(name, options.peer_env, folder, scratch) for name in options.peers.split(",") if name]
        peers = [stack.enter_context(router) for router in found if isinstance(router, Router)]
        for absent in (router for router in found if isinstance(router, str)):
            print(f"absent peer {absent}", flush=True)
        for router in (gateway, *peers):
            router.wait()
        direct = Subject("direct", f"http://127.0.0.1:{PORTS[0]}")
        ours = Subject("ballast", gateway.url, [gateway.process.pid], gateway.children())
        subjects = [direct, ours, *(Subject(router.name, router.url, bench.tree(router.process.pid)) for router in peers)]
        for subject in subjects:
            bench.wrk(subject.url, 16, False, 2)  # warm
        decided = gateway.decisions()
        for _ in range(options.rounds):
            for subject in subjects:
                with load.watched():
                    closed_loop(bench, subject, False, 1, options.seconds, samples)
                    closed_loop(bench, subject, False, CLIENTS, options.seconds, samples)
                    closed_loop(bench, subject, True, CLIENTS, options.seconds, samples)
        for _ in range(SLICES):
            closed_loop(bench, Subject("long run", ours.url, ours.pids), False, CLIENTS, SLICE_S, samples)
        memory = {"rss_mib": gateway.memory_mib(), "pss_mib": bench.rss([gateway.process.pid]), "policy_pss_mib": bench.rss(ours.beside)}
        backends.__exit__()
        stack.enter_context(Backends(folder, itl_ms=(10.0,)))
        for router in (gateway, *peers):
            router.wait()
        for seed in range(options.rounds):
            for subject in subjects:
                open_loop(bench, subject, 2 * options.seconds, seed, samples)
        by_policy, decisions = (now - then for now, then in zip(gateway.decisions(), decided, strict=True))
    fraction = by_policy / max(1.0, decisions)
    print(f"the policy decided {fraction:.1%} of {decisions:.0f} requests", flush=True)
    for (name, what), values in samples.items():
        print(f"{name:12s} {what:22s} {spread(values)}", flush=True)
    more = {
        "peers": [router.name for router in peers], "policy_decided_fraction": round(fraction, 3),
        "policy_us_per_json": round(statistics.median(samples["ballast", f"JSON {CLIENTS} beside_us"])),
        "machine_busy_fraction": round(load.median, 2), **{name: round(value, 1) for name, value in memory.items()},
    }  # fmt: skip
    return _where_it_decided(_cost_bars(samples, memory["rss_mib"]), fraction), more


def _where_it_decided(bars: list[Bar], fraction: float) -> list[Bar]:
    """`bars` and the one that they rest on: what the heuristic decided costs less, and proves nothing."""
    decided = at_least("share of decisions by the policy", fraction, DECIDED_MIN, 1)
    return [decided, *(replace(bar, ok=bar.ok and decided.ok) for bar in bars)]


def _cost_bars(samples: Samples, rss_mib: float) -> list[Bar]:
    def median(name: str, what: str) -> float:
        return statistics.median(samples[name, what])

    def added(what: str) -> float:
        """Over asking a server itself, in the same round."""
        both = zip(samples["ballast", what], samples["direct", what], strict=True)
        return statistics.median(ours - theirs for ours, theirs in both)

    rounds = len(samples["ballast", "ttft_p50"])
    long_run = samples["long run", f"JSON {CLIENTS} cpu_us"]
    drift = statistics.median(long_run[-2:]) / statistics.median(long_run[:2])
    errors = sum(sum(values) for (name, what), values in samples.items() if name in ("ballast", "long run") and "errors" in what)
    return [
        at_most("CPU us per JSON request, 32 clients", median("ballast", f"JSON {CLIENTS} cpu_us"), 700, rounds),
        at_most("CPU us per stream of 20 tokens, 32 clients", median("ballast", f"stream {CLIENTS} cpu_us"), 1000, rounds),
        at_most("CPU per JSON request over 60 s, end / begin", drift, 1.1, 1),
        at_least("JSON requests/s, 32 clients", median("ballast", f"JSON {CLIENTS} per_s"), 1200, rounds),
        at_most("added p50 ms, one client", added("JSON 1 p50_ms"), 0.8, rounds),
        at_most("TTFT added p50 ms, 40 requests/s", added("ttft_p50"), 1.0, rounds),
        at_most("TTFT added p99 ms, 40 requests/s", added("ttft_p99"), 3.0, rounds),
        at_most("gateway process RSS MiB", rss_mib, 120, 1),
        at_most("errors under load", errors, 0, rounds),
    ]


def drills(options: argparse.Namespace, folder: Path, scratch: Path) -> list[Bar]:
    chosen: dict[str, tuple[int, dict[str, object], Drill]] = {name: (20, how, drill) for name, (how, drill) in DRILLS.items()}
    chosen["many_streams"] = many_streams(600.0 if options.long else 30.0)
    bars = []
    for name, (tokens, how, drill) in chosen.items():
        if options.drill and name not in options.drill:
            continue
        with scene(folder, scratch, options.bundle, tokens, **how) as at:
            found = asyncio.run(run(drill, at))
        for bar in found:
            print(f"{'ok  ' if bar.ok else 'MISS'} {bar.name}: {bar.value:g} (wanted {bar.wanted:g})", flush=True)
        bars += found
    return bars


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    folder = bench_folder()
    if folder is None:
        print("skipped: no router_bench; set BALLAST_SHARED to the folder that holds it", flush=True)
        return 0
    bars: list[Bar] = []
    more: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="router-") as name:
        scratch = Path(name)
        options.bundle = options.bundle.resolve() if options.bundle else benchmark_bundle()
        if options.only != "drills" and not options.drill:
            if shutil.which("wrk") is None:
                print("cost skipped: no program wrk on this machine", flush=True)
            else:
                bars, more = cost(load_bench(folder), options, folder, scratch)
                for bar in bars:
                    print(f"{'ok  ' if bar.ok else 'MISS'} {bar.name}: {bar.value:g} (wanted {bar.wanted:g})", flush=True)
        if options.only != "cost":
            bars += drills(options, folder, scratch)
    print_bars(bars, **more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
