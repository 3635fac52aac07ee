"""Starts workers in milliseconds: a process that has imported what workers need and forks one on demand.

Importing torch takes seconds, which a rank that is to be replaced under load does not have. The nursery computes nothing and holds no
thread when it forks. It ends with the controller, and its workers and what they may have left in shared memory with it. Without a
nursery, workers are plain children of the controller. The controller's half imports no torch. A process that has imported the same, as a
service's own nursery has (`runtime.backends.host_nursery`), can fork a nursery instead of starting one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from runtime.torch_tp.forked_process import ForkedProcess, exit_code
from runtime.torch_tp.nursery_process import MESSAGE_BYTES_MAX, NurseryProcess, become_worker, live

PROJECT = Path(__file__).resolve().parents[2]
READY_DEADLINE_S = 300.0


def worker_environment(threads: int, **more: str) -> dict[str, str]:
    """This process's environment, with the project importable and no thread pool wider than `threads`."""
    environment = dict(os.environ)
    paths = [str(PROJECT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    # torch must not open a pool as wide as the machine before it is told
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    return {**environment, **more}


class NurseryGone(RuntimeError):
    """The nursery does not answer; start another."""


class Nursery:
    """The controller's half. Start it early: `start` returns at once, the imports go on meanwhile. Not for several threads at once."""

    PROGRAM: ClassVar = "runtime.torch_tp.nursery_process"
    FOLDER: ClassVar[str | None] = tempfile.gettempdir()
    FORK_DEADLINE_S: ClassVar = 10.0

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._connection: socket.socket | None = None
        self._is_ready = False

    @classmethod
    def forked(cls, not_its: Sequence[int], service: int) -> Nursery:
        """One that is a fork of this process: for a process that has imported what workers need and has no thread.

        not_its: descriptors that are open here and must not be there. service: of a process; once that has ended, the nursery ends this
        one, however stuck or stopped it is.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for descriptor in not_its:
                os.close(descriptor)
            live(NurseryProcess(theirs, become_worker, service).serve)
        theirs.close()
        ours.settimeout(READY_DEADLINE_S)
        nursery = cls()
        nursery._process, nursery._connection = ForkedProcess(pid, exit_code), ours
        return nursery

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.PROGRAM, "--socket", str(theirs.fileno()), "--parent", str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env=worker_environment(1),
                stdin=subprocess.DEVNULL,
                cwd=self.FOLDER,
            )
        ours.settimeout(READY_DEADLINE_S)
        self._connection, self._is_ready = ours, False

    def await_ready(self) -> None:
        """Wait until it has imported everything. Raises: NurseryGone, also when that takes longer than READY_DEADLINE_S."""
        if self._is_ready:
            return
        if self._connection is None:
            raise NurseryGone("the nursery was not started, or is closed")
        try:
            said = self._connection.recv(16)
        except OSError as error:
            raise NurseryGone(f"the nursery did not import within {READY_DEADLINE_S:g} s: {error}") from error
        if said != b"ready":
            raise NurseryGone("the nursery ended while it was importing; see its output")
        self._is_ready = True
        self._connection.settimeout(self.FORK_DEADLINE_S)

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str] | None, descriptors: Sequence[int]) -> ForkedProcess:
        """A worker with `arguments` (of `worker.main`; `{0}` stands for the first of `descriptors` over there, and so on).

        environment: None, the nursery's own.
        Raises: NurseryGone; OSError where the system has no room for another process.
        """
        pid = self._ask(["fork", list(arguments), environment if environment is None else dict(environment)], descriptors)
        if isinstance(pid, str):
            raise OSError(f"the nursery cannot fork: {pid}")
        try:
            return ForkedProcess(pid, self.reap)
        except ProcessLookupError:
            raise NurseryGone("the nursery has ended, and what it forked with it") from None

    def reap(self, pid: int) -> int:
        """Exit code of a child that has ended, as subprocess counts it; -9 where the nursery is gone and cannot say."""
        try:
            return int(self._ask(["reap", pid]))
        except NurseryGone:
            return -signal.SIGKILL

    def _ask(self, request: list[Any], descriptors: Sequence[int] = ()) -> Any:
        if self._connection is None:
            raise NurseryGone("the nursery was not started, or is closed")
        try:
            self.await_ready()
            socket.send_fds(self._connection, [msgspec.msgpack.encode(request)], list(descriptors))
            answer = self._connection.recv(MESSAGE_BYTES_MAX)
        except OSError as error:
            raise NurseryGone(f"the nursery does not answer: {error}") from error
        if not answer:
            raise NurseryGone("the nursery has ended")
        return msgspec.msgpack.decode(answer)

    def kill(self) -> None:
        """Whoever waits for it hears of its end; `close` is still to be called."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the nursery and with it every worker that it still has. May be called twice."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            self._process = None
