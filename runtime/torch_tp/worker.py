"""One rank's process: its socket, its two threads, its epoch. `python -m runtime.torch_tp.worker`, started by the supervisor.

The main thread carries out what the controller orders, one after the other. The second thread reads the socket, so that a fence
is heard while the main thread waits in a collective, and beats, so that a frozen process is told from a busy one. A worker that
loses its controller leaves at once. What a step computes is in `step_runner`.
"""

from __future__ import annotations

import argparse
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from runtime.torch_tp.liveness import BEAT_EVERY_S, Phase, ProgressPage, Slot
from runtime.torch_tp.orders import (
    Beat,
    CarryOrder,
    Configuration,
    Configured,
    Failure,
    Hello,
    LoadOrder,
    PrepareOrder,
    ReduceOrder,
    StepOrder,
    SwitchOrder,
)
from runtime.torch_tp.parent_death import die_with_parent, has_parent
from runtime.torch_tp.process_name import name_process
from runtime.torch_tp.protocol import PROTOCOL_VERSION, FrameReader, Kind, Message, encode, receive, unpack

if TYPE_CHECKING:
    from runtime.torch_tp.step_runner import StepRunner

INBOX_MAX = 256
SEND_DEADLINE_S = 10.0
TOKEN_VARIABLE = "BALLAST_WORKER_TOKEN"


class Worker:
    """Everything of a rank but its arithmetic."""

    def __init__(self, connection: socket.socket, hello: Hello, page: ProgressPage | None, parent_pid: int | None) -> None:
        self._connection = connection
        self._hello = hello
        self._page = page
        self._parent_pid = parent_pid
        self._slot = page.slot(hello.worker) if page is not None else Slot()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._epoch_min = 0  # as told by FENCE; the page says it sooner
        self._epoch = 0
        self._runner: StepRunner | None = None

    def run(self) -> None:
        """Serve until told to leave; never returns."""
        self._connection.settimeout(SEND_DEADLINE_S)
        self._send(Message(Kind.HELLO, body=self._hello))
        threading.Thread(target=self._listen, name="control", daemon=True).start()
        while True:
            message = self._inbox.get()
            # CONFIGURE opens an epoch; everything else belongs to the one it was sent in
            if message.kind not in (Kind.CONFIGURE, Kind.LOAD) and message.epoch != self._epoch:
                continue
            if message.kind is Kind.CONFIGURE and message.epoch <= self._epoch:
                continue
            self._obey(message)

    def is_current(self, epoch: int) -> bool:
        """Whether collectives of `epoch` may go on: no fence has been raised above it."""
        page_min = self._page.epoch_min if self._page is not None else 0
        return epoch >= page_min and epoch >= self._epoch_min

    # --- second thread ------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        reader = FrameReader()
        try:
            while True:
                ready, _, _ = select.select([self._connection], [], [], BEAT_EVERY_S)
                self._beat()
                if not ready:
                    continue
                messages = receive(self._connection, reader)
                if messages is None:
                    os._exit(0)  # the controller is gone or has dropped us: whatever we hold belongs to nobody
                for message in messages:
                    self._sort_in(message)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    def _beat(self) -> None:
        self._slot.beat()
        if self._parent_pid is not None and not has_parent(self._parent_pid):
            os._exit(0)
        if self._page is None:
            reading = self._slot.read()
            self._send(Message(Kind.BEAT, self._epoch, body=Beat(reading.progress, reading.beat, int(reading.phase))))

    def _sort_in(self, message: Message) -> None:
        if message.kind is Kind.DIE:
            os._exit(0)
        if message.kind is Kind.FENCE:
            self._epoch_min = max(self._epoch_min, message.epoch)
            return
        if self._inbox.qsize() >= INBOX_MAX:
            raise RuntimeError(f"{INBOX_MAX} messages wait for the main thread; the controller sends faster than it reads answers")
        self._inbox.put(message)

    # --- main thread --------------------------------------------------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        if self._runner is not None:
            self._slot.enter(Phase.COMPUTING)
            self._slot.tick()
        self._answer(message, self._carry_out)
        if self._runner is not None:
            self._slot.enter(Phase.IDLE)

    def _answer(self, message: Message, handle: Any) -> None:
        try:
            reply = handle(message)
        except Exception as error:
            from runtime.torch_tp.communicators.interface import CollectiveTimeout, PeerLost

            is_peer = isinstance(error, PeerLost | CollectiveTimeout)
            if not is_peer:
                sys.excepthook(*sys.exc_info())
            detail = f"{type(error).__name__}: {error}"
            reply = Kind.FAILED, Failure(int(message.kind), is_peer, detail[:2000])
        if reply is not None:
            kind, body = reply
            self._send(Message(kind, message.epoch, message.plan_version, message.step, body))

    def _carry_out(self, message: Message) -> tuple[Kind, Any] | None:
        if message.kind is Kind.LOAD:
            from runtime.torch_tp.step_runner import StepRunner  # torch: only now, the beat is already going

            order = unpack(LoadOrder, message.body)
            self._runner = StepRunner(self._hello.worker, order, self._slot)
            return Kind.LOADED, self._runner.loaded
        runner = self._runner
        if runner is None:
            raise RuntimeError(f"{message.kind.name} before LOAD")
        if message.kind is Kind.CONFIGURE:
            began_s = time.perf_counter()
            epoch = self._epoch = message.epoch
            runner.configure(epoch, unpack(Configuration, message.body), lambda: self.is_current(epoch))
            return Kind.CONFIGURED, Configured(time.perf_counter() - began_s)
        if message.kind is Kind.STEP:
            return Kind.DONE, runner.step(unpack(StepOrder, message.body))
        if message.kind is Kind.PREPARE:
            work = runner.prepare(unpack(PrepareOrder, message.body))
            self._work_beside(message, lambda _: (Kind.READY, work()))
            return None
        if message.kind is Kind.CARRY:
            carry = runner.carry(unpack(CarryOrder, message.body))
            self._work_beside(message, lambda _: (Kind.CARRIED, carry()))
            return None
        if message.kind is Kind.SWITCH:
            return Kind.SWITCHED, runner.switch(unpack(SwitchOrder, message.body))
        if message.kind is Kind.RELEASE:
            runner.drop_plan(message.plan_version)
            return None
        if message.kind is Kind.PROFILE:
            return Kind.PROFILE, runner.profile(unpack(ReduceOrder, message.body))
        raise RuntimeError(f"{message.kind.name} is nothing a worker can do")

    def _work_beside(self, message: Message, handle: Any) -> None:
        """Copying, in a thread of its own: steps go on meanwhile, and a fence is still heard."""
        threading.Thread(target=self._answer, args=(message, handle), name="bulk", daemon=True).start()

    def _send(self, message: Message) -> None:
        frame = encode(message)
        with self._send_lock:
            try:
                self._connection.sendall(frame)
            except OSError:
                os._exit(0)  # nobody to tell


def connect(address: str) -> socket.socket:
    """`fd:N` (a socket handed over by the parent) or `HOST:PORT`. Raises: ValueError for anything else, OSError when nobody answers."""
    scheme, _, rest = address.rpartition(":")
    if scheme == "fd":
        return socket.socket(fileno=int(rest))
    if not scheme or not rest.isdigit():
        raise ValueError(f"address {address!r}: give HOST:PORT as the controller prints it")
    connection = socket.create_connection((scheme.strip("[]"), int(rest)), timeout=30.0)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def _torchrun_address() -> str | None:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{host}:{port}" if host and port else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m runtime.torch_tp.worker",
        description=f"One tensor-parallel rank. On another host, start it by hand or torchrun, the controller's token in {TOKEN_VARIABLE}.",
    )
    parser.add_argument("--connect", default=_torchrun_address(), help="HOST:PORT of the controller; default: MASTER_ADDR and MASTER_PORT")
    rank = os.environ.get("RANK")
    parser.add_argument(
        "--worker", type=int, default=rank, required=rank is None, help="id in the controller's list of ranks; default: RANK"
    )
    parser.add_argument("--node", default=socket.gethostname(), help="communication domain; workers of one node share memory")
    parser.add_argument("--page-fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--page-slots", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, default=None, help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    if settings.connect is None:
        parser.error("--connect HOST:PORT, or MASTER_ADDR and MASTER_PORT, must say where the controller is")
    # Ctrl-C reaches the whole terminal group: the controller decides what it means, and closes us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name_process(f"rank {settings.worker}")
    if settings.parent is not None:
        die_with_parent(settings.parent)
    token = os.environ.pop(TOKEN_VARIABLE, "")
    try:
        connection = connect(settings.connect)
    except (OSError, ValueError) as error:
        print(f"worker {settings.worker}: cannot reach the controller at {settings.connect}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    page = ProgressPage(settings.page_fd, settings.page_slots) if settings.page_fd >= 0 else None
    hello = Hello(PROTOCOL_VERSION, token, settings.worker, os.getpid(), settings.node)
    Worker(connection, hello, page, settings.parent).run()


if __name__ == "__main__":
    main()
