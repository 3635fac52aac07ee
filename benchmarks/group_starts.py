"""What it takes to bring a lost group back: its host is killed, and time and CPU time are counted until the group serves again.

`python -m benchmarks.group_starts` starts the drill's service, idle, and kills the hosts of its groups in turn. Also tells how long the
service took to start and how much memory its processes have altogether. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.conditions import MachineLoad, spread
from benchmarks.drill import GROUPS, SMALL
from benchmarks.drill_service import DrilledService, drilled
from benchmarks.reporting import at_most, print_bars
from runtime.torch_tp.config import read_config
from runtime.torch_tp.model_folder import model_folder

LOOK_S = 0.02
QUIET_S = 3.0  # between two losses, so that each group has stayed when it is struck
TAIL_S = 0.3  # what is done beside its first moments belongs to the start, too


class CpuTime:
    """CPU time of all processes that a service ever had, those seen to end included."""

    def __init__(self, service: DrilledService) -> None:
        self._service = service
        self._ns: dict[int, int] = {}

    def seconds(self) -> float:
        for pid in self._service.processes():
            try:
                tasks = [Path(f"/proc/{pid}/task/{task}/schedstat").read_text() for task in os.listdir(f"/proc/{pid}/task")]
            except OSError:
                continue  # it has just ended
            self._ns[pid] = max(self._ns.get(pid, 0), sum(int(task.split()[0]) for task in tasks))
        return sum(self._ns.values()) / 1e9


def memory_mib(service: DrilledService) -> float:
    """Proportional share: a page that n processes share counts once."""
    total = 0
    for pid in service.processes():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024.0


def bring_back(service: DrilledService, cpu: CpuTime, group: str) -> tuple[float, float]:
    """Kill a group's host; (seconds until it serves again, CPU seconds spent until then beyond what the idle service takes)."""
    idle_s, began_s = cpu.seconds(), time.monotonic()
    time.sleep(1.0)
    idle_share = (cpu.seconds() - idle_s) / (time.monotonic() - began_s)
    lost = service.host(group)
    assert lost is not None
    cpu_s, struck_s = cpu.seconds(), time.monotonic()
    os.kill(lost, signal.SIGKILL)
    while service.host(group) in (None, lost) or not service.is_whole(group):
        cpu.seconds()
        time.sleep(LOOK_S)
    took_s = time.monotonic() - struck_s
    time.sleep(TAIL_S)
    return took_s, cpu.seconds() - cpu_s - idle_share * (time.monotonic() - struck_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.group_starts", description=__doc__)
    parser.add_argument("--model", default="small", help="small (the shared checkpoint), smollm2, or a path (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="groups killed (default %(default)s)")
    options = parser.parse_args()
    is_small = options.model == "small"
    folder = model_folder(SMALL if is_small else options.model)
    groups = GROUPS["small" if is_small else "large"]
    took_s, cpu_s, load = [], [], MachineLoad()
    with tempfile.TemporaryDirectory(prefix="starts-") as scratch:
        began_s = time.monotonic()
        with drilled(Path(scratch), folder, read_config(folder), groups) as service:
            start_s, cpu = time.monotonic() - began_s, CpuTime(service)
            print(f"service started, {len(groups)} groups: {start_s:.2f} s, {cpu.seconds():.2f} s of CPU, {memory_mib(service):.0f} MiB")
            for number in range(options.rounds):
                time.sleep(QUIET_S)
                with load.watched():
                    times = bring_back(service, cpu, list(groups)[number % len(groups)])
                took_s.append(times[0])
                cpu_s.append(times[1])
    print(f"a lost group is back after {spread(took_s)} s and {spread(cpu_s)} s of CPU; machine busy {load.median:.0%}")
    bars = [at_most("a lost group's start: CPU s, median", sorted(cpu_s)[len(cpu_s) // 2], 1.0, len(cpu_s))]
    print_bars(bars, model=options.model, took_s=took_s, start_s=start_s)


if __name__ == "__main__":
    main()
