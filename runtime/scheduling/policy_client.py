"""The gateway's end of the policy process: starts it, asks it, starts it again when it is stuck or gone. Never waits for it itself."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from envs.decision.actions import Decision
from runtime.frames import FrameCutter, frame
from runtime.scheduling import policy_messages as M
from runtime.scheduling.policy_process import wanted_of

logger = logging.getLogger(__name__)

UNANSWERED_MAX = 64
NOBODYS = 0
"""Number of a question whose answer nobody waits for."""
AT_ONCE_S = 0.0005
"""The event loop stands still for at most so long for an answer. It usually comes in a fifth of that; a turn of a busy loop takes many
times as long, and would give the policy one decision per turn."""
SPIN_S, CALM_S = 0.0002, 0.005
"""Where the last question is older than CALM_S, there is a core to spare, and looking for the answer again and again for SPIN_S is quicker
than to sleep: to be woken takes about as long as the policy does."""
SELECTABLE = 1024
"""`select` looks at no higher descriptors; it is the one call that waits less than a millisecond."""
STUCK_S = 2.0
RESTART_S, RESTART_MAX_S = 0.5, 30.0
DEATH_S = 5.0  # a killed process is gone long before


class PolicyAnswer(msgspec.Struct, frozen=True):
    """index: the choice, -1 where there is none. outside: inputs outside the range seen in training. took_s: from asking. scores: float32
    bytes, one per candidate, empty where there are none."""

    index: int
    outside: int
    error: str
    took_s: float
    scores: bytes = b""


class PolicyClient:
    """One policy process. `state` is "starting", "ready", "refused" (the bundle cannot be used, `detail` says why) or "gone"."""

    def __init__(
        self,
        bundle: str,
        candidates: int,
        command: Sequence[str] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        decision: Decision = "route",
        digest: str = "",
    ) -> None:
        """decision: the kind that it shall make. command: another program that speaks the same, for tests; gets descriptor, parent's id
        and bundle as arguments. digest: of the bundle that it shall load; "": as it finds it, and from then on no other, so that a
        process that is started again after the files were replaced does not bring in what nobody asked for."""
        self.digest = digest
        self.bundle, self._candidates, self._decision, self._now_s = bundle, candidates, decision, now_s
        self._command = list(command or (sys.executable, "-m", "runtime.scheduling.policy_process"))
        self.state, self.detail = "gone", ""
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._cutter = FrameCutter()
        self._asked: dict[int, tuple[float, asyncio.Future[PolicyAnswer]]] = {}
        self._number = 0
        self._asked_s, self._is_calm = -math.inf, False
        self._last: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._has_cores = len(os.sched_getaffinity(0)) > 1  # else the policy could not answer meanwhile
        self._keeper: asyncio.Task[None] | None = None
        self._is_closing = False
        self._dying: set[asyncio.Future[int]] = set()

    async def start(self) -> None:
        """Start the process; decisions go elsewhere until it is ready. Keeps it running until `close`."""
        self._spawn()
        self._keeper = asyncio.create_task(self._keep(), name="policy-keeper")

    async def close(self) -> None:
        self._is_closing = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._end_process()
        if self._dying:
            await asyncio.wait(self._dying, timeout=DEATH_S)

    @property
    def oldest_unanswered_s(self) -> float:
        """Seconds since the oldest question without an answer was asked; 0 without one."""
        return self._now_s() - next(iter(self._asked.values()))[0] if self._asked else 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def expect(self) -> None:
        """A question will come in a moment. Where the last one was long ago, it is asked again for nobody: the process is awake then, and
        what it works with is in its core's caches, which is most of the time that an answer takes."""
        is_free = self.state == "ready" and self._socket is not None and not self._asked
        if is_free and self._last is not None and self._is_calm_at(self._now_s()):
            self._send(M.question(NOBODYS, *self._last))

    def _is_calm_at(self, now_s: float) -> bool:
        return self._has_cores and now_s - self._asked_s > CALM_S

    def ask(self, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray) -> asyncio.Future[PolicyAnswer] | None:
        """A future of the answer; None where the process cannot be asked now."""
        if self.state != "ready" or self._socket is None or len(self._asked) >= UNANSWERED_MAX:
            return None
        self._number += 1
        future: asyncio.Future[PolicyAnswer] = asyncio.get_running_loop().create_future()
        now_s = self._now_s()
        self._is_calm, self._asked_s = self._is_calm_at(now_s), now_s
        self._last = candidates, context, mask
        self._asked[self._number] = now_s, future
        self._send(M.question(self._number, candidates, context, mask))
        return future

    def wait_briefly(self, future: asyncio.Future[PolicyAnswer]) -> bool:
        """Whether the answer came within AT_ONCE_S, for which everything waits; not tried while older questions are unanswered."""
        connection = self._socket
        if len(self._asked) != 1 or connection is None or not 0 <= connection.fileno() < SELECTABLE:
            return future.done()
        begin_s = time.perf_counter()
        while self._is_calm and not future.done() and time.perf_counter() < begin_s + SPIN_S:
            self._receive()
        while not future.done() and (left_s := begin_s + AT_ONCE_S - time.perf_counter()) > 0.0:
            if not select.select((connection,), (), (), left_s)[0]:
                break
            self._receive()  # an answer for nobody, perhaps
        return future.done()

    # --- the socket -----------------------------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        """What is unanswered fits the socket's buffer by far: one that takes no more is stuck."""
        assert self._socket is not None
        try:
            sent = self._socket.send(data)
        except OSError:
            sent = 0
        if sent < len(data):
            self._end_process()

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop_socket()
            if self.state != "refused":
                self.state = "gone"
            self._forget_asked("the policy process is gone")
            return
        try:
            for message in self._cutter.feed(data):
                self._on_message(message)
        except (ValueError, TypeError, IndexError) as error:
            logger.warning("policy process speaks nonsense reason=%s", error)
            self._end_process()

    def _drop_socket(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            asyncio.get_running_loop().remove_reader(connection)
            connection.close()

    # ------------------------------------------------------------------------------------------------------------------------

    def _on_message(self, message: list[Any]) -> None:
        if message[0] == M.READY:
            self.state, self.digest = "ready", str(message[2])
            logger.info("policy ready pid=%s bundle=%s", self.pid, self.bundle)
        elif message[0] == M.REFUSED:
            self.state, self.detail = "refused", str(message[1])
            logger.warning("policy bundle refused reason=%s", self.detail)
        else:
            _, number, index, outside, error, scores = message
            asked = self._asked.pop(number, None)
            if asked is not None and not asked[1].done():
                asked[1].set_result(PolicyAnswer(int(index), int(outside), str(error), self._now_s() - asked[0], bytes(scores)))

    def _forget_asked(self, reason: str) -> None:
        asked, self._asked = self._asked, {}
        for asked_s, future in asked.values():
            if not future.done():
                future.set_result(PolicyAnswer(-1, 0, reason, self._now_s() - asked_s))

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._cutter = FrameCutter()
        self.state, self.detail = "starting", ""
        command = [*self._command, str(theirs.fileno()), str(os.getpid()), self.bundle]
        try:
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=_one_thread())
        finally:
            theirs.close()
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours, self._receive)
        self._send(frame([wanted_of(self._candidates, self._decision), self.digest]))

    async def _keep(self) -> None:
        wait_s = RESTART_S
        while not self._is_closing:
            await asyncio.sleep(0.05)
            if self.state == "ready" and self.oldest_unanswered_s > STUCK_S:
                logger.warning("policy process stuck pid=%s", self.pid)
                self._end_process()
            if self.state == "refused":
                continue
            if self.state == "gone":
                self._end_process()
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RESTART_MAX_S)
                self.restarts += 1
                self._spawn()
            elif self.state == "ready" and not self._asked:
                wait_s = RESTART_S

    def _end_process(self) -> None:
        """Its death is waited for beside: on full cores that may take longer than a call's decision may."""
        self._drop_socket()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            death = asyncio.get_running_loop().run_in_executor(None, partial(process.wait, DEATH_S))
            self._dying.add(death)
            death.add_done_callback(self._dying.discard)
        if self.state != "refused":
            self.state = "gone"
        self._forget_asked("the policy process is gone")


def _one_thread() -> dict[str, str]:
    """A small product does not want a thread per core."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
