"""Plain twins and closed forms that the compiled code is held against. Slow and obvious on purpose."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class PlainRequest:
    """One request of the plain group; times in s."""

    arrival_s: float
    prompt: int
    output: int
    computed: int = 0
    generated: int = 0
    first_s: float = math.nan
    finish_s: float = math.nan


def plain_group(requests: list[PlainRequest], step_s, running_limit: int, chunk: int) -> list[PlainRequest]:
    """One group, first come first served, chunked prefill, step by step, endless KV.

    step_s(tokens, pairs, kv, sequences) gives one step's seconds. Returns the requests with their times filled in.
    """
    waiting = sorted(requests, key=lambda r: r.arrival_s)
    running: list[PlainRequest] = []
    clock = 0.0
    while waiting or running:
        if not running and waiting[0].arrival_s > clock:
            clock = waiting[0].arrival_s
        budget = chunk
        chunks: dict[int, int] = {}
        for r in running:
            if r.computed < r.prompt:
                chunks[id(r)] = min(budget, r.prompt - r.computed)
                budget -= chunks[id(r)]
        decoding = [r for r in running if r.computed >= r.prompt]
        while waiting and waiting[0].arrival_s <= clock and len(running) < running_limit and budget > 0:
            r = waiting.pop(0)
            running.append(r)
            chunks[id(r)] = min(budget, r.prompt)
            budget -= chunks[id(r)]
        tokens = len(decoding) + sum(chunks.values())
        pairs = sum(chunks[id(r)] * (r.computed + 0.5 * (chunks[id(r)] + 1)) for r in running if chunks.get(id(r)))
        kv = sum(r.prompt + r.generated - 1 for r in decoding)
        ending = sum(1 for r in running if chunks.get(id(r)) and r.computed + chunks[id(r)] >= r.prompt)
        clock += step_s(tokens, pairs, kv, len(decoding) + ending)
        for r in decoding:
            r.generated += 1
        for r in running:
            if chunks.get(id(r)):
                r.computed += chunks[id(r)]
                if r.computed >= r.prompt:
                    r.generated, r.first_s = 1, clock
        for r in [r for r in running if r.generated >= r.output]:
            r.finish_s = clock
            running.remove(r)
    return requests


def mm1_wait_s(rate: float, service_s: float) -> float:
    """Mean wait of M/M/1: rho S / (1 - rho)."""
    rho = rate * service_s
    return rho * service_s / (1.0 - rho)


def md1_wait_s(rate: float, service_s: float) -> float:
    """Mean wait of M/D/1 (Pollaczek-Khinchine): rho S / (2 (1 - rho))."""
    return mm1_wait_s(rate, service_s) / 2.0


def mmc_wait_s(rate: float, service_s: float, servers: int) -> float:
    """Mean wait of M/M/c (Erlang C)."""
    load = rate * service_s
    head = sum(load**k / math.factorial(k) for k in range(servers))
    tail = load**servers / math.factorial(servers) * servers / (servers - load)
    return tail / (head + tail) * service_s / (servers - load)
