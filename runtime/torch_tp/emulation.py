"""Plays a slower device on this host: every stretch of computing ends no earlier than its own CPU time times a factor.

An emulation, and marked as one wherever it shows. The deadline is absolute and counts the rank's own thread CPU time only, so
several slow ranks can share two cores, and time taken by other processes is not multiplied. What slows real devices (caches,
clocks, memory) is not played.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MACHINE_BUSY_FRACTION_MAX = 0.60
"""Above this the cores are contended: sleeps end late and CPU times swell, so that a run says nothing about the factors."""


@dataclass(slots=True)
class SlowDown:
    """Delays one rank's main thread. factor: how many times slower than this host's core; 1 does nothing.

    begin() starts a stretch; end() sleeps until its deadline and returns the seconds slept. Sleeps end late by a clock tick or so;
    what one ended late is taken off the next (but no more than `debt_s_max`, or a long stall would make the rank run free).
    """

    factor: float
    thread_time_s: Callable[[], float] = time.thread_time
    now_s: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    debt_s_max: float = 0.002
    slept_s: float = 0.0
    _cpu_s: float = field(default=0.0, init=False)
    _began_s: float = field(default=0.0, init=False)
    _late_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if not 1.0 <= self.factor <= 1000.0:
            raise ValueError(f"slow_factor={self.factor} must be within 1 to 1000; a device faster than this host cannot be emulated")

    @property
    def is_active(self) -> bool:
        return self.factor > 1.0

    def begin(self) -> None:
        self._cpu_s, self._began_s = self.thread_time_s(), self.now_s()

    def end(self) -> float:
        """Wait out the stretch and begin the next; returns the seconds slept."""
        if not self.is_active:
            return 0.0
        deadline_s = self._began_s + (self.thread_time_s() - self._cpu_s) * self.factor - self._late_s
        started_s = now_s = self.now_s()
        if deadline_s > now_s:
            self.sleep(deadline_s - now_s)
            now_s = self.now_s()
        self._late_s = min(max(now_s - deadline_s, 0.0), self.debt_s_max)
        slept_s = now_s - started_s
        self.slept_s += slept_s
        self.begin()
        return slept_s


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Jiffies of all cores since boot, from /proc/stat."""

    busy: int
    total: int

    @classmethod
    def take(cls, path: str = "/proc/stat") -> CpuSample:
        with open(path, encoding="ascii") as file:
            fields = [int(value) for value in file.readline().split()[1:9]]  # guest time is part of user time
        idle = fields[3] + fields[4]
        return cls(sum(fields) - idle, sum(fields))

    def busy_fraction_since(self, earlier: CpuSample) -> float:
        """Share of all cores' time that was busy; 0 for an empty stretch."""
        total = self.total - earlier.total
        return (self.busy - earlier.busy) / total if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class EmulationVerdict:
    """Whether a run with slow factors may be quoted."""

    busy_fraction: float
    slow_factors: tuple[float, ...]

    @property
    def is_emulated(self) -> bool:
        return any(factor > 1.0 for factor in self.slow_factors)

    @property
    def is_void(self) -> bool:
        return self.is_emulated and self.busy_fraction > MACHINE_BUSY_FRACTION_MAX

    def __str__(self) -> str:
        if not self.is_emulated:
            return "no emulation"
        text = f"EMULATED slow_factor={','.join(f'{factor:g}' for factor in self.slow_factors)}, machine CPU {self.busy_fraction:.0%}"
        return text + (f": VOID, over {MACHINE_BUSY_FRACTION_MAX:.0%}" if self.is_void else "")


def verdict(before: CpuSample, after: CpuSample, slow_factors: Sequence[float]) -> EmulationVerdict:
    return EmulationVerdict(after.busy_fraction_since(before), tuple(slow_factors))
