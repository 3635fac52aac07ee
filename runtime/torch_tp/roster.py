"""The workers of one controller, whatever group they are in: started, let in, heard, watched, and dropped for good.

What a loss means for a group, and every message about an epoch, is the supervisor's business.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from envs.decision.detection import FailureKind
from runtime.torch_tp.front_door import FrontDoor
from runtime.torch_tp.group_values import LostRank, RankSettings, SupervisorSettings
from runtime.torch_tp.liveness import Phase, ProgressPage, Reading, Slot, Watch, is_suspect, process_state
from runtime.torch_tp.nursery import Nursery
from runtime.torch_tp.orders import Beat, Hello, Loaded, LoadOrder
from runtime.torch_tp.protocol import PROTOCOL_VERSION, Kind, Message, ProtocolError, tokens_match, unpack
from runtime.torch_tp.worker_link import Child, Standing, WorkerLink, reap, spawn

logger = logging.getLogger(__name__)

QUIET_S = 0.2
"""A worker that gave a sign of life within that is not looked at any closer."""


class RosterOwner(Protocol):
    """Who is told what happens to workers."""

    def on_loaded(self, link: WorkerLink, loaded: Loaded) -> None: ...
    def on_message(self, link: WorkerLink, message: Message) -> None: ...
    def on_lost(self, lost: LostRank, was_member: bool) -> None: ...


class Roster:
    """All methods belong to the thread that runs `selector`."""

    def __init__(
        self,
        model: str,
        ranks: Sequence[RankSettings],
        settings: SupervisorSettings,
        token: str,
        nursery: Nursery | None,
        selector: selectors.BaseSelector,
        owner: RosterOwner,
        now_s: Callable[[], float],
    ) -> None:
        self._model, self._settings, self._token, self._nursery = model, settings, token, nursery
        self._selector, self._owner, self._now_s = selector, owner, now_s
        self.page = ProgressPage.create(len(ranks))
        self.links = [
            WorkerLink(worker, rank, Slot() if rank.is_remote else self.page.slot(worker), Watch.start(now_s()))
            for worker, rank in enumerate(ranks)
        ]
        self.door: FrontDoor | None = None
        self._dying: list[Child] = []
        self._uses_network = False

    def standing(self, standing: Standing) -> list[WorkerLink]:
        return [link for link in self.links if link.standing is standing]

    def open_door(self, host: str, port: int) -> None:
        """Let remote workers in there. Raises: OSError when the port is taken."""
        self.door = FrontDoor(host, port, self._token, self.links, self._selector, self._adopt, self._now_s)

    # --- workers come -------------------------------------------------------------------------------------------------------

    def spawn_all(self, uses_network: bool) -> None:
        """uses_network: see `LoadOrder`."""
        self._uses_network = uses_network
        for link in self.links:
            if link.settings.is_remote:
                link.standing = Standing.LOADING
                link.deadline_s = self._now_s() + self._settings.start_deadline_s
            else:
                self._spawn(link)

    def respawn(self, link: WorkerLink) -> None:
        """Raises: ValueError for a worker that runs, or is not ours to start."""
        if link.standing is not Standing.ABSENT or link.settings.is_remote:
            what = f"{link.standing.value}{' and remote' if link.settings.is_remote else ''}"
            raise ValueError(f"worker {link.worker} is {what}; only a lost local one can be started again")
        self._spawn(link)

    def _spawn(self, link: WorkerLink) -> None:
        self._adopt(link, spawn(link, self.page, self._token, self._nursery))

    def _adopt(self, link: WorkerLink, connection: socket.socket, messages: Sequence[Message] = ()) -> None:
        now = self._now_s()
        link.adopt(connection, self._selector, lambda mask: self._on_socket(link, mask), now)
        link.deadline_s = now + self._settings.start_deadline_s
        for message in messages:
            self._hear(link, message)

    # --- messages -----------------------------------------------------------------------------------------------------------

    def send(self, link: WorkerLink, message: Message) -> None:
        link.send(message, self._selector)
        if link.is_clogged:
            self.lose(link, FailureKind.RANK_FROZEN, f"reads nothing: {len(link.outgoing)} bytes wait for it")

    def _on_socket(self, link: WorkerLink, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and link.connection is not None:
            link.flush(self._selector)
        if not mask & selectors.EVENT_READ or link.connection is None:
            return
        try:
            data = link.connection.recv(1 << 18)
            messages = list(link.reader.feed(data))
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            self.lose(link, FailureKind.RANK_KILLED, f"connection failed: {error}")
            return
        if not data:
            code = None if link.process is None else link.process.poll()
            self.lose(link, FailureKind.RANK_KILLED, "connection closed" if code is None else f"exit code {code}")
            return
        for message in messages:
            self._hear(link, message)

    def _hear(self, link: WorkerLink, message: Message) -> None:
        try:
            if message.kind is Kind.HELLO:
                self._on_hello(link, unpack(Hello, message.body))
            elif message.kind is Kind.BEAT:
                beat = unpack(Beat, message.body)
                link.slot.write(Reading(beat.progress, beat.beat, Phase(beat.phase)))
            elif message.kind is Kind.LOADED:
                link.loaded, link.standing, link.deadline_s = unpack(Loaded, message.body), Standing.SPARE, float("inf")
                logger.info("worker loaded worker=%d pid=%s seconds=%.2f", link.worker, link.pid, link.loaded.seconds)
                self._owner.on_loaded(link, link.loaded)
            else:
                self._owner.on_message(link, message)
        except (ProtocolError, ValueError) as error:
            self.lose(link, FailureKind.RANK_KILLED, f"sent nonsense: {error}")

    def _on_hello(self, link: WorkerLink, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION or not tokens_match(hello.token, self._token):
            self.lose(link, FailureKind.RANK_KILLED, f"speaks protocol {hello.protocol_version}, this is {PROTOCOL_VERSION}")
            return
        link.node = hello.node
        rank, group = link.settings, self._settings
        order = LoadOrder(
            self._model, rank.device, group.dtype, rank.threads, group.kv_tokens_max, group.slots_max, rank.slow_factor, self._uses_network
        )
        self.send(link, Message(Kind.LOAD, body=order))

    # --- workers go ---------------------------------------------------------------------------------------------------------

    def watch(self, now_s: float, owing: set[int], predicted_step_s: float) -> None:
        """Lose whoever is dead, frozen, or not loaded in time. owing: workers of whom a step or a new group waits."""
        self._dying = [process for process in self._dying if process.poll() is None]
        for link in self.links:
            if link.standing is not Standing.ABSENT:
                self._look_at(link, now_s, link.worker in owing, predicted_step_s)
            if link.standing is Standing.LOADING and now_s > link.deadline_s:
                self.lose(link, FailureKind.RANK_FROZEN, f"not loaded within {self._settings.start_deadline_s:g} s")
        if self.door is not None:
            self.door.expire()

    def _look_at(self, link: WorkerLink, now_s: float, owes: bool, predicted_step_s: float) -> None:
        link.watch.observe(link.slot.read(), now_s)
        if link.process is not None and link.process.poll() is not None:
            self.lose(link, FailureKind.RANK_KILLED, f"exit code {link.process.returncode}")
            return
        silent_s = now_s - min(link.watch.beaten_s, link.watch.progressed_s)
        if silent_s < QUIET_S:
            return
        state = None if link.pid is None else process_state(link.pid)
        if is_suspect(link.watch, now_s, predicted_step_s if owes else 0.0, owes, state):
            self.lose(link, FailureKind.RANK_FROZEN, f"no sign of life for {silent_s:.3f} s (process state {state or 'unknown'})")

    def lose(self, link: WorkerLink, kind: FailureKind, detail: str) -> None:
        """Drop a worker for good: killed here, fenced wherever it is."""
        if link.standing is Standing.ABSENT:
            return
        was_member = link.standing is Standing.MEMBER
        process = link.drop(self._selector)
        if process is not None:
            self._dying.append(process)
        now = self._now_s()
        lost = LostRank(link.worker, kind, detail, now, now - max(link.watch.beaten_s, link.watch.progressed_s))
        self._owner.on_lost(lost, was_member)

    def sever(self, worker: int) -> bool:
        """Cut the connection to a worker; False where there is none."""
        connection = self.links[worker].connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return connection is not None

    def close(self) -> None:
        """Have every worker leave, and see that it does."""
        for link in self.links:
            if link.connection is not None:
                self.send(link, Message(Kind.DIE))
        deadline_s = time.monotonic() + self._settings.stop_deadline_s
        for process in [*self._dying, *(link.process for link in self.links if link.process is not None)]:
            reap(process, deadline_s - time.monotonic())
        for link in self.links:
            link.process = None
            link.drop(self._selector)
        if self.door is not None:
            self.door.close()
        self.page.close()
