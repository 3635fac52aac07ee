"""What must not be felt, on scripted backends: a server that answers 503, refuses, dies, falls silent or is slow; callers who are wrong or
leave; and many streams at once. Each drill begins with fresh servers and a fresh service, and gives bars."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.reporting import Bar, at_least, at_most
from benchmarks.router_clients import Callers, Outcome, failed
from benchmarks.router_processes import Backends, Gateway

EXTRA_MAX = 0.25
SLOW_ITL_MS = 100.0
STREAMS = 1024
Drill = Callable[["Scene"], Coroutine[Any, Any, list[Bar]]]


class Scene:
    """Servers, service and callers of one drill."""

    def __init__(self, backends: Backends, gateway: Gateway, callers: Callers) -> None:
        self.backends, self.gateway, self.callers = backends, gateway, callers


@contextmanager
def scene(folder: Path, scratch: Path, bundle: Path, tokens: int = 20, **backends: Any) -> Iterator[Scene]:
    with Backends(folder, tokens, **backends) as servers, Gateway(scratch, bundle) as gateway:
        gateway.wait()
        yield Scene(servers, gateway, Callers(gateway.url, tokens))


async def run(drill: Drill, at: Scene) -> list[Bar]:
    try:
        return await drill(at)
    finally:
        at.callers.close()


async def _one_of_four(at: Scene, name: str, strike: Callable[[], None]) -> list[Bar]:
    """60 requests before, so that all have been used; then one fails and 160 more come at 20 a second."""
    await at.callers.many(60, 4)
    before = at.backends.total("requests")
    strike()
    tasks = await at.callers.at_rate(20.0, 8.0)
    outcomes = await asyncio.gather(*tasks)
    alive = [stats for stats, process in zip(_stats(at), at.backends.processes, strict=True) if process.poll() is None]
    attempts = sum(int(stats["requests"]) for stats in alive) - before
    bars = [at_most(f"{name}: client errors of 160", failed(outcomes), 0, len(outcomes))]
    if len(alive) == len(at.backends.processes):  # a killed one has taken its count with it
        bars.append(at_most(f"{name}: extra attempts, share", max(0.0, attempts / len(outcomes) - 1.0), EXTRA_MAX, len(outcomes)))
    else:
        retries = at.gateway.metric('ballast_attempt_events_total{event="retries"}')
        bars.append(at_most(f"{name}: extra attempts, share", retries / len(outcomes), EXTRA_MAX, len(outcomes)))
    return bars


def _stats(at: Scene) -> list[dict[str, Any]]:
    if all(process.poll() is None for process in at.backends.processes):
        return at.backends.stats()
    return [{"requests": 0} for _ in at.backends.processes]


async def answers_503(at: Scene) -> list[Bar]:
    return await _one_of_four(at, "one of four answers 503", lambda: at.backends.fault((0,), "status", 503))


async def refuses(at: Scene) -> list[Bar]:
    return await _one_of_four(at, "one of four refuses", lambda: at.backends.fault((0,), "refuse"))


async def killed(at: Scene) -> list[Bar]:
    return await _one_of_four(at, "one of four killed", lambda: at.backends.kill(0))


async def client_errors(at: Scene) -> list[Bar]:
    """60 requests that the servers find wrong, then 20 good ones (K24)."""
    everywhere = range(len(at.backends.processes))
    at.backends.fault(everywhere, "status", 400)
    wrong = await at.callers.many(60, 8)
    at.backends.fault(everywhere, "none")
    good = await at.callers.many(20, 4)
    assert {outcome.status for outcome in wrong} == {400}, "a caller's mistake is told as such"
    return [at_least("served of 20 after 60 client 400s", len(good) - failed(good), 20, 20)]


async def all_busy(at: Scene) -> list[Bar]:
    """503 with Retry-After from all, then all well."""
    everywhere = range(len(at.backends.processes))
    at.backends.fault(everywhere, "status", 503)
    await at.callers.many(60, 8)
    at.backends.fault(everywhere, "none")
    began_s = time.monotonic()
    while not (await at.callers.ask()).is_whole and time.monotonic() - began_s < 70.0:
        await asyncio.sleep(0.05)
    return [at_most("all 503, then well: s to the first good answer", time.monotonic() - began_s, 2.0, 1)]


async def dies_in_streams(at: Scene) -> list[Bar]:
    """Server after server cuts six streams after their fifth token."""
    outcomes = await _server_after_server(at, "die", 6)
    return [
        at_least("dies at token 5: streams cut", _lost(at), 1, len(outcomes)),
        at_most("dies at token 5: not whole", failed(outcomes), 0, len(outcomes)),
        at_most("dies at token 5: tokens twice", sum(len(o.tokens) - len(set(o.tokens)) for o in outcomes), 0, len(outcomes)),
    ]


async def falls_silent(at: Scene) -> list[Bar]:
    """itl_ms 10: the bar is 3 x 10 ms + 2 s from the last token to the next. Server after server falls silent after a fifth token."""
    await at.callers.many(40, 8, is_stream=True)  # the usual gap is known
    outcomes = await _server_after_server(at, "hang", 1)
    silent_s = max(max(outcome.gaps_s, default=0.0) for outcome in outcomes)
    return [
        at_least("silent stream: streams that fell silent", _lost(at), 1, len(outcomes)),
        at_most("silent stream: s until it goes on", silent_s, 3 * 0.010 + 2.0, len(outcomes)),
        at_most("silent stream: not whole", failed(outcomes), 0, len(outcomes)),
    ]


async def _server_after_server(at: Scene, mode: str, count: int) -> list[Outcome]:
    """24 streams while one server has the fault for `count` of them, then the next server: a router may like to spare one of them."""
    outcomes = []
    for i in range(len(at.backends.processes)):
        at.backends.fault((i,), mode, 5, count)
        outcomes += await at.callers.many(24, 8, is_stream=True)
        at.backends.fault((i,), "none")
    return outcomes


def _lost(at: Scene) -> float:
    return at.gateway.metric('ballast_attempt_events_total{event="attempts_lost"}')


async def callers_leave(at: Scene) -> list[Bar]:
    """itl_ms 100: they leave after half a second of two."""
    bars = []
    for is_stream in (True, False):
        gone = at.backends.total("aborted")
        await asyncio.gather(*(at.callers.ask(is_stream, leave_after_s=0.5) for _ in range(8)))
        began_s = time.monotonic()
        while at.backends.total("aborted") < gone + 8 and time.monotonic() - began_s < 5.0:
            await asyncio.sleep(0.01)
        kind = "stream" if is_stream else "JSON"
        bars.append(at_most(f"cancel ({kind}): s until 8 backends know", time.monotonic() - began_s, 0.5, 8))
    metrics = at.gateway.metrics()
    left = sum(value for name, value in metrics.items() if name.startswith(("ballast_requests_in_flight", "vllm:num_requests_")))
    bars.append(at_most("cancel: requests left in the counters", left, 0, 16))
    return bars


async def one_is_slow(at: Scene) -> list[Bar]:
    """One ten times slower, no page that tells load: its share of what 32 callers ask."""
    outcomes = await at.callers.many(1200, 32)
    counts = [int(stats["requests"]) for stats in at.backends.stats()]
    return [
        at_most("10x slower, no load page: share of requests", counts[3] / sum(counts), 0.06, len(outcomes)),
        at_most("10x slower: client errors", failed(outcomes), 0, len(outcomes)),
    ]


def many_streams(during_s: float) -> tuple[int, dict[str, Any], Drill]:
    """1,024 streams open for so long, a token every half second each."""
    tokens = max(4, round(during_s / 0.5))

    async def drill(at: Scene) -> list[Bar]:
        tasks = [asyncio.create_task(at.callers.ask(is_stream=True)) for _ in range(STREAMS)]
        warm_s = min(60.0, 0.4 * during_s)  # until buffers and tables have their size: growth after that is growth without end
        await asyncio.sleep(warm_s)
        memory, files = at.gateway.memory_mib(), at.gateway.descriptors()
        await asyncio.sleep(0.9 * during_s - warm_s)
        growth, more = at.gateway.memory_mib() / memory - 1.0, at.gateway.descriptors() - files
        outcomes = await asyncio.gather(*tasks)
        for outcome in [outcome for outcome in outcomes if not outcome.is_whole][:3]:
            print(f"  not whole: {outcome.error}", flush=True)
        return [
            at_most(f"{STREAMS} streams for {during_s:g} s: not whole", failed(outcomes), 0, STREAMS),
            at_most(f"{STREAMS} streams: memory growth after {warm_s:g} s, share", growth, 0.02, 1),
            at_most(f"{STREAMS} streams: more descriptors", more, 0, 1),
        ]

    return tokens, {"itl_ms": (500.0,)}, drill


DRILLS: dict[str, tuple[dict[str, Any], Drill]] = {
    "answers_503": ({}, answers_503),
    "refuses": ({}, refuses),
    "killed": ({}, killed),
    "client_errors": ({}, client_errors),
    "all_busy": ({}, all_busy),
    "dies_in_streams": ({}, dies_in_streams),
    "falls_silent": ({"itl_ms": (10.0,)}, falls_silent),
    "callers_leave": ({"itl_ms": (SLOW_ITL_MS,)}, callers_leave),
    "one_is_slow": ({"itl_ms": (5.0, 5.0, 5.0, 50.0), "has_load_page": False}, one_is_slow),
}
