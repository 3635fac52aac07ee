"""Where a rank's step goes, seen at the one place where ranks wait for each other: its communicator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from runtime.torch_tp.communicators.interface import Communicator, Pending
from runtime.torch_tp.emulation import SlowDown
from runtime.torch_tp.liveness import Phase, Slot
from runtime.torch_tp.profiler import OPERATIONS


@dataclass(slots=True)
class StepClock:
    """Where a rank's step goes: stretches of computing by the operation whose collective ends them, and the collectives.

    On a CPU a stretch computes for the CPU time of its thread (times the factor of an emulated device); what is left of it is a stall.
    On a CUDA device the thread only launches, so the whole stretch counts as computing.
    """

    slow_down: SlowDown
    counts_cpu_time: bool
    compute_s: float = 0.0
    stall_s: float = 0.0
    communication_s: float = 0.0
    busy_s: list[float] = field(default_factory=lambda: [0.0] * len(OPERATIONS))
    _wall_s: float = 0.0
    _cpu_s: float = 0.0

    def start(self) -> None:
        """A stretch of computing begins."""
        self.slow_down.begin()
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def end_stretch(self, operation: int) -> None:
        """A collective begins."""
        cpu_s = (time.thread_time() - self._cpu_s) * self.slow_down.factor
        self.slow_down.end()
        now = time.perf_counter()
        wall_s = now - self._wall_s
        compute_s = min(cpu_s, wall_s) if self.counts_cpu_time else wall_s
        self.compute_s += compute_s
        self.stall_s += wall_s - compute_s
        self.busy_s[operation] += wall_s
        self._wall_s = now

    def end_collective(self) -> None:
        self.communication_s += time.perf_counter() - self._wall_s
        self.start()


class WatchedPending:
    """A sum under way, whose wait shows like any collective."""

    def __init__(self, inner: Pending, owner: WatchedCommunicator, operation: int) -> None:
        self._inner, self._owner, self._operation = inner, owner, operation

    def wait(self) -> None:
        self._owner.before(self._operation)
        self._inner.wait()
        self._owner.after()


class WatchedCommunicator:
    """A communicator that shows on the rank's slot when it waits, and tells the clock which operation each collective ends.

    A step's all-reduces alternate, attention and MLP (of two half batches each, where they overlap); gathers belong to the vocabulary.
    """

    def __init__(self, inner: Communicator, slot: Slot) -> None:
        self._inner = inner
        self._slot = slot
        self._sums = 0
        self.clock: StepClock | None = None
        self.rank, self.size = inner.rank, inner.size

    def begin_step(self, clock: StepClock) -> None:
        self.clock, self._sums = clock, 0
        clock.start()

    def before(self, operation: int) -> None:
        if self.clock is not None:
            self.clock.end_stretch(operation)
        self._slot.tick()
        self._slot.enter(Phase.WAITING)

    def after(self) -> None:
        self._slot.enter(Phase.COMPUTING)
        if self.clock is not None:
            self.clock.end_collective()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.before(self._sums % 2)
        self._sums += 1
        self._inner.all_reduce(tensor)
        self.after()

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending:
        operation = self._sums // 2 % 2
        self.before(operation)
        self._sums += 1
        pending = self._inner.start_all_reduce(tensor)
        self.after()
        return WatchedPending(pending, self, operation)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.before(2)
        parts = self._inner.all_gather(tensor)
        self.after()
        return parts

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._inner.exchange(sends, receives)

    def close(self) -> None:
        self._inner.close()
