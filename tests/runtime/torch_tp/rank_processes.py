"""Real processes as ranks: forked from a server that has torch loaded, so that a rank starts in milliseconds."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from runtime.torch_tp.communicators.segment_names import segment_name

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["runtime.torch_tp.communicators.hierarchical", "tests.runtime.torch_tp.rank_programs"])
_epochs = itertools.count(1)  # of this process: each group of a test has its own names


@dataclass(frozen=True)
class Outcome:
    """What a rank's program returned, or the name and text of what it raised, and when (monotonic seconds)."""

    value: Any
    error: str | None
    text: str
    at_s: float


def _run(program: Callable[..., Any], options: dict[str, Any], answer: Connection) -> None:
    import torch

    from runtime.torch_tp.parent_death import die_with_parent

    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    try:
        outcome = Outcome(program(**options), None, "", time.monotonic())
    except Exception as error:
        outcome = Outcome(None, type(error).__name__, f"{error}\n{traceback.format_exc()}", time.monotonic())
    answer.send(outcome)
    answer.close()
    os._exit(0)  # gloo's destructors may wait for a peer that was killed on purpose


class Ranks:
    """The processes of one group; `send_signal` hits one, `outcomes` collects the others' results."""

    def __init__(self, program: Callable[..., Any], size: int, domains: tuple[tuple[int, ...], ...] | None, **options: Any) -> None:
        self.epoch = next(_epochs)
        cut = domains if domains is not None else (tuple(range(size)),)
        names = tuple(segment_name(os.getpid(), self.epoch, f"domain{index}") for index in range(len(cut)))
        self._answers, self.processes = [], []
        for rank in range(size):
            ours, theirs = _context.Pipe(duplex=False)
            settings = {"epoch": self.epoch, "rank": rank, "members": tuple(range(size)), "domains": cut, "segment_names": names, **options}
            process = _context.Process(target=_run, args=(program, settings, theirs), daemon=True)
            process.start()
            theirs.close()
            self._answers.append(ours)
            self.processes.append(process)

    def send_signal(self, rank: int, number: signal.Signals) -> float:
        """Returns: when."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        return time.monotonic()

    def outcome(self, rank: int, deadline_s: float = 120.0) -> Outcome:
        if not self._answers[rank].poll(deadline_s):
            raise AssertionError(f"rank {rank} did not answer within {deadline_s:g} s")
        answer: Outcome = self._answers[rank].recv()
        return answer

    def values(self) -> list[Any]:
        """Results of all ranks. Raises: AssertionError with the text of the first that failed."""
        found = [self.outcome(rank) for rank in range(len(self.processes))]
        for rank, outcome in enumerate(found):
            assert outcome.error is None, f"rank {rank}: {outcome.text}"
        return [outcome.value for outcome in found]

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self.processes:
            process.join(60.0)


@contextlib.contextmanager
def ranks(program: Callable[..., Any], size: int, domains: tuple[tuple[int, ...], ...] | None = None, **options: Any) -> Iterator[Ranks]:
    """Start `program(epoch=, rank=, members=, domains=, segment_names=, **options)` on every rank; all are gone at the end."""
    group = Ranks(program, size, domains, **options)
    try:
        yield group
    finally:
        group.end()
