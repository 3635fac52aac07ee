"""The faults of the drill: each strikes processes of a running service from outside, as a machine or an operator's mistake would."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
from dataclasses import dataclass

from benchmarks.drill_service import DrilledService, words
from envs.decision.detection import DETECTION, DetectionRule, FailureKind
from runtime.frames import FRAME_BYTES_MAX, framed

_PIDFD_GETFD = 438
SLOW_S, SLOW_STOP_S, SLOW_RUN_S = 2.0, 0.03, 0.03


@dataclass(frozen=True, slots=True)
class FaultKind:
    """rule: what DESIGN section 7 promises of it; None where nothing is to be noticed. takes_group: the whole group is lost."""

    name: str
    rule: DetectionRule | None
    takes_group: bool = False


_KILLED, _FROZEN, _GONE = (DETECTION[kind] for kind in (FailureKind.RANK_KILLED, FailureKind.RANK_FROZEN, FailureKind.GROUP_GONE))
KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("kill", _KILLED),
        FaultKind("freeze", _FROZEN),
        FaultKind("cut", _KILLED),
        FaultKind("slow", None),
        FaultKind("garble", _FROZEN),  # bytes that look like a long message are noticed by the silence after them
        FaultKind("group", _GONE, takes_group=True),
        FaultKind("garble_group", _GONE, takes_group=True),
    )
}
"""garble: wrong bytes on a rank's control socket; garble_group: on a group host's."""


async def strike(service: DrilledService, kind: FaultKind, group: str, rng: random.Random) -> bool:
    """Hurt a random rank of a group, or its host; False where it was gone already."""
    host, ranks = service.host(group), service.ranks(group)
    if host is None or not ranks:
        return False
    rank = rng.choice(ranks)
    try:
        if kind.name == "kill":
            os.kill(rank, signal.SIGKILL)
        elif kind.name == "freeze":
            os.kill(rank, signal.SIGSTOP)
        elif kind.name == "group":
            os.kill(host, signal.SIGKILL)
        elif kind.name == "slow":
            await _slow_down(rank)
        elif kind.name == "garble_group":
            _garble(host, _host_socket(host), rng)
        else:
            descriptor = _control_socket(rank)
            if kind.name == "garble":
                _garble(rank, descriptor, rng)
            else:
                with _socket_of(rank, descriptor) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
    except (ProcessLookupError, IndexError):
        return False
    return True


async def _slow_down(pid: int) -> None:
    """Half its speed for a while, in pieces too short to count as frozen."""
    end_s = asyncio.get_running_loop().time() + SLOW_S
    with contextlib.suppress(ProcessLookupError):
        while asyncio.get_running_loop().time() < end_s:
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(SLOW_STOP_S)
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(SLOW_RUN_S)


def _garble(pid: int, descriptor: int, rng: random.Random) -> None:
    """Wrong bytes to whoever listens at the other end: noise, one byte of it, a frame of noise, a length of much that never comes."""
    noise = rng.randbytes(64)
    wrong = rng.choice((noise, noise[:1], framed(noise), (FRAME_BYTES_MAX - 1).to_bytes(4, "big")))
    with _socket_of(pid, descriptor) as connection, contextlib.suppress(BlockingIOError):
        connection.send(wrong, socket.MSG_DONTWAIT)


def _host_socket(pid: int) -> int:
    """The descriptor on which a group host hears the gateway: named where it is an interpreter of its own, else its first one."""
    said = words(pid)
    return int(said[3]) if "runtime.backends.group_host" in said else _control_socket(pid)


def _control_socket(pid: int) -> int:
    """The descriptor of a rank's one stream socket that leaves no host. Raises: ProcessLookupError where there is none."""
    try:
        for descriptor in sorted(int(entry) for entry in os.listdir(f"/proc/{pid}/fd")):
            if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith("socket:"):
                with _socket_of(pid, descriptor) as found:
                    if found.family == socket.AF_UNIX and found.type == socket.SOCK_STREAM:
                        return descriptor
    except FileNotFoundError:
        pass
    raise ProcessLookupError(f"process {pid} has no control socket")


def _socket_of(pid: int, descriptor: int) -> socket.socket:
    """Another process's socket, opened here as well. Raises: ProcessLookupError where it is gone; OSError where the kernel forbids it."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        found = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if found < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"pidfd_getfd: {os.strerror(number)}") if number != 9 else ProcessLookupError(number, "closed")
    finally:
        os.close(process)
    return socket.socket(fileno=found)
