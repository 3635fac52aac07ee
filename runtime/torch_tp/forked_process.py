"""A process that somebody else forked for us, or that we forked ourselves without `subprocess`."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable


class ForkedProcess:
    """A process that was forked on demand, with the part of `subprocess.Popen` that its users need."""

    def __init__(self, pid: int, reap: Callable[[int], int]) -> None:
        """reap: has it reaped once it has ended, and returns its exit code."""
        self.pid = pid
        self.returncode: int | None = None
        self._reap = reap
        # who forked it reaps only when told, so until then the id is this child's and nobody else's
        self._descriptor = os.pidfd_open(pid)
        self._end = select.poll()  # select() would not take the descriptors of a process that has a thousand open
        self._end.register(self._descriptor, select.POLLIN)

    def poll(self) -> int | None:
        if self.returncode is None and self._end.poll(0):
            self._finish()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._end.poll(None if timeout is None else 1e3 * timeout):
                raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
            self._finish()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _finish(self) -> None:
        self.returncode = self._reap(self.pid)
        os.close(self._descriptor)


def exit_code(pid: int) -> int:
    """Reap a child that has ended, or wait until it does; its exit code as subprocess counts it."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return -signal.SIGKILL
