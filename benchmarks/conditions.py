"""Under what conditions a run was timed: the scheduling class of its processes, and how busy the machine was meanwhile."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from runtime.torch_tp.emulation import MACHINE_BUSY_FRACTION_MAX, CpuSample


def ask_realtime(wanted: bool = True) -> str:
    """Put this process and all that it will start under SCHED_RR where that is allowed; returns the class in force, in words.

    Under the ordinary class gloo's helper threads wait for a tick of 4 ms, and whatever else runs on the machine is in the figures.
    """
    if not wanted:
        return "ordinary scheduling, as asked"
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError as error:
        return f"ordinary scheduling, since SCHED_RR is not allowed here ({error.strerror})"
    return "SCHED_RR, priority 1"


@dataclass(slots=True)
class MachineLoad:
    """Share of all cores that was busy in each round."""

    fractions: list[float] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = CpuSample.take()
        yield
        self.fractions.append(CpuSample.take().busy_fraction_since(before))

    @property
    def median(self) -> float:
        return statistics.median(self.fractions) if self.fractions else 0.0

    @property
    def is_void_for_emulation(self) -> bool:
        """Whether sleeps that play slow devices cannot be trusted (see `runtime.torch_tp.emulation`)."""
        return self.median > MACHINE_BUSY_FRACTION_MAX


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range, for people."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
