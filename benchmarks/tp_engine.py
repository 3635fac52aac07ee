"""Every ratio that the tensor-parallel engine promises, each against its rival in the same run: `python -m benchmarks.tp_engine`.

A and B take turns; a figure is the median of the rounds. What each measurement does is told in the module named in MEASUREMENTS. The
last line is one JSON object with the bars. Exit code 1 where a bar was missed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from benchmarks.conditions import ask_realtime
from benchmarks.reporting import Bar, print_bars
from benchmarks.tp_settings import BenchSettings

MEASUREMENTS = {
    "transformers": "benchmarks.tp_against_transformers:measure",
    "collectives": "benchmarks.tp_engine:collectives",
    "uneven": "benchmarks.tp_split:measure",
    "resplit": "benchmarks.tp_split:measure_slides",
    "losses": "benchmarks.tp_losses:measure",
}
"""Name → function that takes BenchSettings and gives bars."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tp_engine", description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(MEASUREMENTS), choices=MEASUREMENTS, metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of every pair (default %(default)s)")
    parser.add_argument("--model", default="smollm2", help="directory, .gguf file or known name (default %(default)s)")
    parser.add_argument("--size", type=float, default=1.0, help="factor on the length of a round, to try things out (default %(default)s)")
    parser.add_argument("--ordinary", action="store_true", help="do not ask for SCHED_RR")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    settings = BenchSettings(options.model, options.rounds, options.size)
    scheduling = ask_realtime(not options.ordinary)
    print(f"model {settings.model}, {settings.rounds} rounds, {scheduling}", flush=True)
    bars: list[Bar] = []
    for name in options.only:
        print(f"\n== {name}", flush=True)
        bars += _measured(name, partial(_measure, MEASUREMENTS[name], settings))
    print("\n" + table(bars))
    print_bars(bars, model=settings.model, scheduling=scheduling)
    return 0 if all(bar.ok for bar in bars) else 1


def _measure(place: str, settings: BenchSettings) -> list[Bar]:
    module, _, function = place.partition(":")
    bars: list[Bar] = getattr(importlib.import_module(module), function)(settings)
    return bars


def _measured(name: str, measure: Callable[[], Iterable[Bar]]) -> list[Bar]:
    """The bars of a measurement; one that fails is told as a bar missed, and does not take the others with it."""
    bars: list[Bar] = []
    try:
        bars += measure()
    except (OSError, RuntimeError, TimeoutError) as error:
        traceback.print_exc()
        bars.append(Bar(f"{name}: FAILED, {type(error).__name__}", 0.0, 0.0, False, 0))
    return bars


def collectives(settings: BenchSettings) -> list[Bar]:
    """All of `benchmarks.tp_collectives`, which keeps to rounds of its own."""
    from benchmarks.tp_collectives import BENCHMARKS
    from runtime.torch_tp.rendezvous import listen, serve_store

    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    store = serve_store(listener)
    is_realtime = os.sched_getscheduler(0) == os.SCHED_RR
    bars: list[Bar] = []
    for name, measure in BENCHMARKS.items():
        print(f"{name}: {measure.__doc__}", flush=True)
        bars += _measured(name, partial(measure, address, is_realtime))
    del store
    return bars


def table(bars: Sequence[Bar]) -> str:
    width = max((len(bar.name) for bar in bars), default=0)
    lines = [f"{'':{width}}  {'value':>9}  {'wanted':>7}  {'':6}  n"]
    lines += [f"{bar.name:{width}}  {bar.value:9.3f}  {bar.wanted:7.2f}  {'ok' if bar.ok else 'missed':6}  {bar.n}" for bar in bars]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
