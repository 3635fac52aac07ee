"""The controller's end of one worker: its process, its socket, its signs of life. What it says is left to the supervisor."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from runtime.torch_tp.forked_process import ForkedProcess
from runtime.torch_tp.group_values import RankSettings
from runtime.torch_tp.liveness import ProgressPage, Slot, Watch
from runtime.torch_tp.nursery import Nursery, worker_environment
from runtime.torch_tp.orders import Loaded
from runtime.torch_tp.protocol import FrameReader, Message, encode
from runtime.torch_tp.worker import TOKEN_VARIABLE

OUTGOING_BYTES_MAX = 64 * 2**20

Child = subprocess.Popen[bytes] | ForkedProcess


class Standing(Enum):
    ABSENT = "absent"  # not started, or lost
    LOADING = "loading"
    SPARE = "spare"  # loaded, in no group
    MEMBER = "member"


@dataclass(slots=True)
class WorkerLink:
    """Everything the supervisor holds of one worker. deadline_s: until when it must be loaded."""

    worker: int
    settings: RankSettings
    slot: Slot
    watch: Watch
    standing: Standing = Standing.ABSENT
    process: Child | None = None
    connection: socket.socket | None = None
    reader: FrameReader = field(default_factory=FrameReader)
    outgoing: bytearray = field(default_factory=bytearray)
    node: str = ""
    loaded: Loaded | None = None
    deadline_s: float = float("inf")

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def is_clogged(self) -> bool:
        """Whether the worker has stopped reading."""
        return len(self.outgoing) > OUTGOING_BYTES_MAX

    def adopt(self, connection: socket.socket, selector: selectors.BaseSelector, on_event: Callable[[int], None], now_s: float) -> None:
        """Speak with the worker through this socket from now on."""
        connection.setblocking(False)
        self.connection = connection
        self.reader, self.outgoing = FrameReader(), bytearray()
        self.standing = Standing.LOADING
        self.watch = Watch.start(now_s)
        selector.register(connection, selectors.EVENT_READ, on_event)

    def send(self, message: Message, selector: selectors.BaseSelector) -> None:
        """Send, or keep for when the socket takes it. A dead socket shows as an event of its own, not in the middle of an order."""
        if self.connection is not None:
            self.outgoing += encode(message)
            self.flush(selector)

    def flush(self, selector: selectors.BaseSelector) -> None:
        assert self.connection is not None
        try:
            while self.outgoing:
                del self.outgoing[: self.connection.send(self.outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outgoing else 0)
        key = selector.get_key(self.connection)
        if key.events != events:
            selector.modify(self.connection, events, key.data)

    def drop(self, selector: selectors.BaseSelector) -> Child | None:
        """End it: its socket, and its process where that is ours. Returns the process, to be reaped; nobody waits for it here."""
        self.standing = Standing.ABSENT
        if self.connection is not None:
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(self.connection)
            self.connection.close()
            self.connection = None
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)  # also ends a stopped process
        return process


def spawn(link: WorkerLink, page: ProgressPage, token: str, nursery: Nursery | None) -> socket.socket:
    """Start the worker's process; returns our end of its socket. The kernel kills it when the calling thread (or the nursery) ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        descriptors = (theirs.fileno(), page.file_descriptor)
        link.slot.clear()
        arguments = ["--worker", str(link.worker), "--node", link.settings.node or "local", "--page-slots", str(page.slots)]
        environment = worker_environment(link.settings.threads, **{TOKEN_VARIABLE: token})
        if nursery is not None:
            link.process = nursery.fork(["--connect", "fd:{0}", "--page-fd", "{1}", *arguments], environment, descriptors)
            return ours
        fixed = ["--connect", f"fd:{descriptors[0]}", "--page-fd", str(descriptors[1]), "--parent", str(os.getpid())]
        link.process = subprocess.Popen(
            [sys.executable, "-m", "runtime.torch_tp.worker", *fixed, *arguments],
            pass_fds=descriptors,
            env=environment,
            stdin=subprocess.DEVNULL,
            cwd=tempfile.gettempdir(),
        )
    return ours


def reap(process: Child, timeout_s: float) -> None:
    """Wait for an end, then force it: a zombie would hold its id."""
    for number, patience_s in ((None, timeout_s), (signal.SIGKILL, 1.0)):
        if number is not None and process.poll() is None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(patience_s, 0.01))
