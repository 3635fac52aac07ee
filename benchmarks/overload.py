"""What is served in time when more is asked than can be served: `python -m benchmarks.overload`.

EMULATION: groups of `envs.group_kernel` behind the service's own dispatcher, by default in virtual time, so that neither the machine's
speed nor its other work is in the figures. First the capacity (the highest rate at which 95 % of the weight asked for meets its limits),
then the weighted goodput (DESIGN section 8's limits) at multiples of it, with shedding and without in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import virtual_time
from benchmarks.conditions import spread
from benchmarks.reporting import at_least, print_bars
from envs.domain.requests import SERVICE_CLASSES
from envs.scenario.cluster_file import load_cluster
from runtime.backends.emulated import EmulatedBackend
from runtime.calls import Call, Refusal
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.telemetry import Telemetry
from runtime.torch_tp.requests import SamplingSettings

MULTIPLES = (1.0, 2.0, 3.0, 5.0)
GOOD_FRACTION = 0.95
SHARES = (0.5, 0.3, 0.2)  # of calls, in the order of SERVICE_CLASSES: chat, code, batch
PROMPT_TOKENS = (300.0, 900.0, 1500.0)  # median
PROMPT_SIGMA = 0.6
OUTPUT_TOKENS = (96, 48, 128)
PROMPT_MAX = 6000
CAPACITY_STEPS = 6


@dataclass(frozen=True, slots=True)
class Seen:
    """One call as its caller saw it. end: "good" (within its limits), which limit it missed, or a refusal's reason."""

    class_index: int
    end: str


@dataclass(frozen=True, slots=True)
class Slice:
    """rate_per_s of calls for warm_s + counted_s; only those that came in counted_s count."""

    rate_per_s: float
    sheds: bool
    seed: int
    warm_s: float
    counted_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """goodput_per_s: weight served within its limits, per s; asked_per_s: weight asked for."""

    goodput_per_s: float
    asked_per_s: float
    ends: Counter[tuple[str, str]]

    def told(self) -> str:
        """Per class, what became of its calls, in percent."""
        words = []
        for service in SERVICE_CLASSES:
            ends = {end: count for (name, end), count in self.ends.items() if name == service.name}
            total = max(1, sum(ends.values()))
            words.append(f"{service.name}: " + ", ".join(f"{end} {100 * count / total:.0f} %" for end, count in sorted(ends.items())))
        return "; ".join(words)


def draw(index: int, rng: np.random.Generator, now_s: float) -> Call:
    c = int(rng.choice(len(SHARES), p=SHARES))
    prompt = int(min(PROMPT_MAX, max(8.0, PROMPT_TOKENS[c] * np.exp(PROMPT_SIGMA * rng.standard_normal()))))
    return Call(
        call_id=f"call-{index}", model="m", kind="completion", prompt_ids=(), prompt_tokens=prompt, max_tokens=OUTPUT_TOKENS[c],
        sampling=SamplingSettings(), stop_strings=(), logprobs=None, class_index=c, priority=SERVICE_CLASSES[c].priority, session=None,
        user=None, deadline_s=now_s + 120.0, ignore_eos=True,
    )  # fmt: skip


async def ask(dispatcher: Dispatcher, call: Call, now_s: Callable[[], float]) -> Seen:
    began_s = first_s = now_s()
    tokens = 0
    try:
        async for piece in dispatcher.run(call):
            if not tokens:
                first_s = now_s()
            tokens += piece.tokens
    except Refusal as refusal:
        return Seen(call.class_index, refusal.reason)
    service = SERVICE_CLASSES[call.class_index]
    tpot_s = (now_s() - first_s) / max(1, tokens - 1)
    if first_s - began_s > service.ttft_limit_s(call.prompt_tokens):
        return Seen(call.class_index, "late first token")
    return Seen(call.class_index, "good" if tpot_s <= service.tpot_limit_s else "slow tokens")


async def serve(cluster_name: str, chosen: Slice) -> Found:
    """One slice, on a service of its own; ends when every call has ended."""
    cluster, now_s = load_cluster(cluster_name), asyncio.get_running_loop().time
    telemetry = Telemetry(cluster)
    backends = [EmulatedBackend(group, g, cluster.limits, now_s=now_s) for g, group in enumerate(cluster.groups)]
    dispatcher = Dispatcher(backends, telemetry, DispatchSettings(sheds_overload=chosen.sheds), now_s=now_s, seed=chosen.seed)
    dispatcher.load_kernels()
    await dispatcher.start()
    rng = np.random.default_rng(chosen.seed)
    begin_s = at_s = now_s()
    tasks: list[tuple[bool, asyncio.Task[Seen]]] = []
    while at_s < begin_s + chosen.warm_s + chosen.counted_s:
        await asyncio.sleep(at_s - now_s())
        task = asyncio.create_task(ask(dispatcher, draw(len(tasks), rng, now_s()), now_s))
        tasks.append((at_s >= begin_s + chosen.warm_s, task))
        at_s += rng.exponential(1.0 / chosen.rate_per_s)
    await asyncio.gather(*(task for _, task in tasks))
    await dispatcher.close()
    counted = [task.result() for is_counted, task in tasks if is_counted]
    weights = [service.weight for service in SERVICE_CLASSES]
    good = sum(weights[seen.class_index] for seen in counted if seen.end == "good")
    asked = sum(weights[seen.class_index] for seen in counted)
    ends = Counter((SERVICE_CLASSES[seen.class_index].name, seen.end) for seen in counted)
    return Found(good / chosen.counted_s, asked / chosen.counted_s, ends)


def capacity_per_s(play: Callable[[Slice], Found], first_per_s: float, warm_s: float, counted_s: float) -> float:
    """Doubled until too much, then halved between; without shedding."""

    def keeps(rate_per_s: float) -> bool:
        found = play(Slice(rate_per_s, False, 0, warm_s, counted_s))
        print(f"capacity: {rate_per_s:6.2f} calls/s, {found.goodput_per_s / found.asked_per_s:.3f} in time; {found.told()}", flush=True)
        return found.goodput_per_s >= GOOD_FRACTION * found.asked_per_s

    low, high = 0.0, first_per_s
    while keeps(high):
        low, high = high, 2.0 * high
    for _ in range(CAPACITY_STEPS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cluster", default="unlike-3", help="cluster file or ready cluster, all groups emulated")
    parser.add_argument("--rounds", type=int, default=3, help="of every multiple, with shedding and without")
    parser.add_argument("--warm-s", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="counted, of one slice")
    parser.add_argument("--capacity-per-s", type=float, help="calls per s (default: looked for)")
    parser.add_argument("--real-time", action="store_true", help="on the wall clock, where the machine must keep up")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    run: Callable[[Coroutine[Any, Any, Found]], Found] = asyncio.run if options.real_time else virtual_time.run

    def play(chosen: Slice) -> Found:
        return run(serve(options.cluster, chosen))

    print(f"EMULATION of {options.cluster}, {'wall clock' if options.real_time else 'virtual time'}", flush=True)
    capacity = options.capacity_per_s or capacity_per_s(play, 4.0, options.warm_s, options.seconds)
    goodputs: dict[tuple[float, bool], list[float]] = defaultdict(list)
    for seed in range(1, options.rounds + 1):
        for multiple in MULTIPLES:
            for sheds in (True, False):
                found = play(Slice(multiple * capacity, sheds, seed, options.warm_s, options.seconds))
                goodputs[multiple, sheds].append(found.goodput_per_s)
                how = "shedding" if sheds else "without"
                print(f"{multiple:g} x {how:8s} {found.goodput_per_s:6.2f} of {found.asked_per_s:6.2f}/s; {found.told()}", flush=True)
    for (multiple, sheds), values in goodputs.items():
        print(f"{multiple:g} x capacity, {'shedding' if sheds else 'without'}: goodput {spread(values)} weight/s", flush=True)
    medians = {key: statistics.median(values) for key, values in goodputs.items()}
    peak = max(medians.values())
    last = MULTIPLES[-1]
    bars = [at_least(f"goodput at {last:g} x capacity / peak, shedding", medians[last, True] / peak, 0.95, options.rounds)]
    print_bars(bars, capacity_per_s=round(capacity, 3), without_shedding=round(medians[last, False] / peak, 3), is_emulation=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
