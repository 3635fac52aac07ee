"""Routing steps per CPU second of the environment, observation included, without a network: random legal actions against
always-first legal actions, interleaved. Compilation is reported apart."""

from __future__ import annotations

import statistics
import time

import numpy as np

from benchmarks.reporting import at_least, print_bars
from envs.default_worlds import make_env

REPEATS = 5
STEPS = 4000


def measure(seed: int, is_random: bool, steps: int) -> float:
    """Steps per CPU second over `steps` steps, resets included."""
    env = make_env(asked=("route",))
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    begin = time.process_time()
    for _ in range(steps):
        legal = np.flatnonzero(env.action_masks())
        routes = legal[:-1] if len(legal) > 1 else legal  # the last legal one is refuse
        _, _, terminated, truncated, _ = env.step(int(routes[rng.integers(len(routes))]) if is_random else int(routes[0]))
        if terminated or truncated:
            env.reset()
    return steps / (time.process_time() - begin)


def main() -> None:
    begin = time.process_time()
    measure(0, True, 300)
    compile_s = time.process_time() - begin
    rates: dict[str, list[float]] = {"random": [], "first": []}
    for repeat in range(REPEATS):
        for name, taken in rates.items():
            taken.append(measure(repeat, name == "random", STEPS))
            print(f"run {repeat + 1} {name}: {taken[-1]:,.0f} steps/CPU s", flush=True)
    bars = [
        at_least(f"routing steps per CPU s, {name} actions", statistics.median(taken), 5000.0, REPEATS) for name, taken in rates.items()
    ]
    print_bars(bars, compile_cpu_s=round(compile_s, 1), steps=STEPS)


if __name__ == "__main__":
    main()
