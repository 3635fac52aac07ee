"""The nursery's process: imports what its children need, then forks one whenever it is asked to. See `nursery`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import msgspec

from runtime.torch_tp.communicators.segment_names import sweep_stale_segments
from runtime.torch_tp.forked_process import exit_code
from runtime.torch_tp.parent_death import has_parent, leave_with_parent, wake_with_parent
from runtime.torch_tp.process_name import name_process

PRELOADED = ("runtime.torch_tp.step_runner", "runtime.torch_tp.communicators.shared_memory")
PROCESS_NAME = "nursery"
MESSAGE_BYTES_MAX = 1 << 17

Become = Callable[[Sequence[str], Sequence[int], int], int]
"""What a child does with its arguments, its descriptors and the id of the process that forked it; returns its exit code."""


def main(arguments: Sequence[str] | None = None, preloaded: Sequence[str] = PRELOADED, become: Become | None = None) -> None:
    parser = argparse.ArgumentParser(description="A nursery, started by its controller, not by hand.")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    settings = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_with_parent(settings.parent)  # while it imports; later the end of the socket says so, and then there is something to clear away
    for module in preloaded:
        importlib.import_module(module)
    importlib.import_module("runtime.torch_tp.rank_kernels").load()
    gc.freeze()  # what is imported stays shared with the children
    NurseryProcess(socket.socket(fileno=settings.socket), become or become_worker).serve()


class NurseryProcess:
    """Serves one controller over `connection`. No thread is alive here when it forks."""

    def __init__(self, connection: socket.socket, become: Become, service: int | None = None) -> None:
        """service: of a process with which the controller has to end."""
        self._connection, self._become, self._service = connection, become, service
        self._children: set[int] = set()
        self._wait = select.poll()
        for descriptor in (connection.fileno(), *([] if service is None else [service])):
            self._wait.register(descriptor, select.POLLIN)

    def serve(self) -> NoReturn:
        """Until the other end of the connection is gone; then the children go, too."""
        name_process(PROCESS_NAME)
        wake_with_parent()
        parent_pid = os.getppid()
        with contextlib.suppress(OSError):  # the other end is gone in the middle of an answer
            self._connection.send(b"ready")
            while not self._is_service_over():
                data, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES_MAX, 8)
                if not data:
                    break
                answer = self._obey(msgspec.msgpack.decode(data), descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                if answer is not None:
                    self._connection.send(msgspec.msgpack.encode(answer))
            else:
                if has_parent(parent_pid):
                    os.kill(parent_pid, signal.SIGKILL)
        self._clear_away()
        os._exit(0)  # taking torch down in good order would take seconds, and nothing is left to be done

    def _is_service_over(self) -> bool:
        """Wait for the next order, or for the service's end."""
        return self._service in [descriptor for descriptor, _ in self._wait.poll()]

    def _obey(self, order: Sequence[Any], descriptors: Sequence[int]) -> int | str | None:
        """What to answer: a child's id, or why there is none; the exit code of one that has ended; nothing."""
        if order[0] == "fork":
            return self._fork(order[1], order[2], descriptors)
        self._children.discard(order[1])
        code = exit_code(order[1])
        return code if order[0] == "reap" else None

    def _fork(self, words: Sequence[str], environment: Mapping[str, str] | None, descriptors: Sequence[int]) -> int | str:
        nursery_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return str(error)
        if pid == 0:
            self._connection.close()
            if self._service is not None:
                os.close(self._service)
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            live(partial(self._become, [word.format(*descriptors) for word in words], descriptors, nursery_pid))
        self._children.add(pid)
        return pid

    def _clear_away(self) -> None:
        """End the children, also stopped ones, and take what they had not yet unlinked."""
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            exit_code(pid)
        sweep_stale_segments()


def live(act: Callable[[], int]) -> NoReturn:
    """A forked child's life: nothing of what its parent was in the middle of goes on in it."""
    code = 1
    try:
        code = act()
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
