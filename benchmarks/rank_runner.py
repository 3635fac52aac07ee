"""Runs a program on several rank processes, in the real-time round-robin class where that is allowed."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["runtime.torch_tp.communicators.hierarchical"])
PRIORITY = 10


def round_robin_allowed() -> bool:
    """Whether this process may use SCHED_RR, without which other jobs of the machine disturb every figure of microseconds."""
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
    except PermissionError:
        return False
    os.sched_setscheduler(0, before, parameters)
    return True


def _run(program: Callable[..., Any], options: dict[str, Any], answer: Connection, round_robin: bool) -> None:
    import torch

    from runtime.torch_tp.parent_death import die_with_parent

    die_with_parent(os.getppid())  # a benchmark that is stopped leaves nobody spinning in a real-time class
    torch.set_num_threads(1)
    if round_robin:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
    try:
        answer.send((program(**options), None))
    except Exception:
        answer.send((None, traceback.format_exc()))
    answer.close()
    os._exit(0)  # no destructor of a group may wait for another rank


def run_ranks(program: Callable[..., Any], size: int, *, round_robin: bool, deadline_s: float = 300.0, **options: Any) -> list[Any]:
    """`program(rank=..., **options)` on every rank; their results. Raises: RuntimeError with a rank's traceback, TimeoutError."""
    running = []
    for rank in range(size):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_run, args=(program, {"rank": rank, **options}, theirs, round_robin), daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours))
    results = []
    try:
        for rank, (_, answer) in enumerate(running):
            if not answer.poll(deadline_s):
                raise TimeoutError(f"rank {rank} has not answered within {deadline_s:g} s")
            value, failure = answer.recv()
            if failure is not None:
                raise RuntimeError(f"rank {rank}:\n{failure}")
            results.append(value)
    finally:
        for process, _ in running:
            process.kill()
            process.join(5.0)
    return results
