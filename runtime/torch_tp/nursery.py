"""Starts workers in milliseconds: a process that has imported what workers need and forks one on demand.

Importing torch takes seconds, which a rank that is to be replaced under load does not have. The nursery computes nothing and holds no
thread when it forks. It ends with the controller, and its workers and what they may have left in shared memory with it. Without a
nursery, workers are plain children of the controller. The controller's half imports no torch. A process that has imported the same, as a
service's own nursery has (`runtime.backends.host_nursery`), can fork a nursery instead of starting one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec

from runtime.torch_tp.communicators.segment_names import sweep_stale_segments
from runtime.torch_tp.parent_death import leave_with_parent, wake_with_parent
from runtime.torch_tp.process_name import name_process

PROJECT = Path(__file__).resolve().parents[2]
PRELOADED = ("runtime.torch_tp.step_runner", "runtime.torch_tp.communicators.shared_memory")
READY_DEADLINE_S = 300.0
MESSAGE_BYTES_MAX = 1 << 17


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


class Nursery:
    """The controller's half. Start it early: `start` returns at once, the imports go on meanwhile. Not for several threads at once."""

    PROGRAM: ClassVar = "runtime.torch_tp.nursery"
    FOLDER: ClassVar[str | None] = tempfile.gettempdir()
    FORK_DEADLINE_S: ClassVar = 10.0

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._connection: socket.socket | None = None
        self._is_ready = False

    @classmethod
    def forked(cls, not_its: Sequence[int]) -> Nursery:
        """One that is a fork of this process: for a process that has imported what workers need and has no thread.

        not_its: descriptors that are open here and must not be there.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            _close(not_its)
            _become(partial(serve, theirs, become_worker))
        theirs.close()
        ours.settimeout(READY_DEADLINE_S)
        nursery = cls()
        nursery._process, nursery._connection = ForkedProcess(pid, _exit_code), ours
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


# --- the process ------------------------------------------------------------------------------------------------------------

Become = Callable[[Sequence[str], Sequence[int], int], int]
"""What a child does with its arguments, its descriptors and the id of the process that forked it; returns its exit code."""


def main(arguments: Sequence[str] | None = None, preloaded: Sequence[str] = PRELOADED, become: Become | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m runtime.torch_tp.nursery", description="Started by the controller, not by hand.")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    settings = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_with_parent(settings.parent)  # while it imports; later the end of the socket says so, and then there is something to clear away
    for module in preloaded:
        importlib.import_module(module)
    gc.freeze()  # what is imported stays shared with the children
    serve(socket.socket(fileno=settings.socket), become or become_worker)


def serve(connection: socket.socket, become: Become) -> NoReturn:
    """Fork a child whenever the other end of `connection` asks for one, until that end is gone; then the children go, too."""
    name_process("nursery")
    wake_with_parent()
    children: set[int] = set()
    with contextlib.suppress(OSError):  # the other end is gone in the middle of an answer
        connection.send(b"ready")
        while True:
            data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 8)
            if not data:
                break
            request = msgspec.msgpack.decode(data)
            if request[0] in ("reap", "let_go"):
                children.discard(request[1])
                code = _exit_code(request[1])
                if request[0] == "reap":
                    connection.send(msgspec.msgpack.encode(code))
                continue
            nursery_pid = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                connection.send(msgspec.msgpack.encode(str(error)))
                _close(descriptors)
                continue
            if pid == 0:
                connection.close()
                _, words, environment = request
                if environment is not None:
                    os.environ.clear()
                    os.environ.update(environment)
                _become(partial(become, [word.format(*descriptors) for word in words], descriptors, nursery_pid))
            children.add(pid)
            _close(descriptors)
            connection.send(msgspec.msgpack.encode(pid))
    _clear_away(children)
    os._exit(0)  # taking torch down in good order would take seconds, and nothing is left to be done


def _clear_away(children: set[int]) -> None:
    """The other end is gone: end its children, also stopped ones, and take what they had not yet unlinked."""
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _exit_code(pid)
    sweep_stale_segments()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _exit_code(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return -signal.SIGKILL


def _become(live: Callable[[], int]) -> NoReturn:
    """A child's life: nothing of what its parent was in the middle of goes on in it."""
    code = 1
    try:
        code = live()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def become_worker(arguments: Sequence[str], descriptors: Sequence[int], parent_pid: int) -> int:
    from runtime.torch_tp import worker

    worker.main([*arguments, "--parent", str(parent_pid)])
    return 0


if __name__ == "__main__":
    main()
