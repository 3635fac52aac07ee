"""Every ratio that the tensor-parallel engine promises, each against its rival in the same run: `python -m benchmarks.tp_engine`.

A and B take turns; a figure is the median of the rounds. What each measurement does is told in the module named in MEASUREMENTS. The
last line is one JSON object with the bars. Exit code 1 where a bar was missed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from benchmarks.conditions import ask_realtime
from benchmarks.reporting import Bar, print_bars
from benchmarks.tp_settings import BenchSettings

MEASUREMENTS = {
    "transformers": "benchmarks.tp_against_transformers:measure",
    "collectives": "benchmarks.tp_collectives:measure",
    "uneven": "benchmarks.tp_split:measure",
    "resplit": "benchmarks.tp_split:measure_slides",
    "losses": "benchmarks.tp_losses:measure",
}
"""Name → function that takes BenchSettings and gives bars."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tp_engine", description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(MEASUREMENTS), choices=MEASUREMENTS, metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of every pair (default %(default)s)")
    parser.add_argument("--model", default="smollm2", help="directory, .gguf file or known name (default %(default)s)")
    parser.add_argument("--size", type=float, default=1.0, help="factor on the length of a round, to try things out (default %(default)s)")
    parser.add_argument("--ordinary", action="store_true", help="do not ask for SCHED_RR")
    options = parser.parse_args(arguments)
    settings = BenchSettings(options.model, options.rounds, options.size)
    scheduling = ask_realtime(not options.ordinary)
    print(f"model {settings.model}, {settings.rounds} rounds, {scheduling}", flush=True)
    bars: list[Bar] = []
    for name in options.only:
        print(f"\n== {name}", flush=True)
        module, _, function = MEASUREMENTS[name].partition(":")
        bars += getattr(importlib.import_module(module), function)(settings)
    print("\n" + table(bars))
    print_bars(bars, model=settings.model, scheduling=scheduling)
    return 0 if all(bar.ok for bar in bars) else 1


def table(bars: Sequence[Bar]) -> str:
    width = max((len(bar.name) for bar in bars), default=0)
    lines = [f"{'':{width}}  {'value':>9}  {'wanted':>7}  {'':6}  n"]
    lines += [f"{bar.name:{width}}  {bar.value:9.3f}  {bar.wanted:7.2f}  {'ok' if bar.ok else 'missed':6}  {bar.n}" for bar in bars]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
