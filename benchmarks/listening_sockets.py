"""TCP sockets that processes listen on, by inode: a socket keeps its inode whoever holds it, and no other one is taken for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"


def listening() -> dict[int, str]:
    """Local address of every listening socket by inode, in hex as /proc/net/tcp has it (0100007F:1F90 is 127.0.0.1:8080)."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {int(row[9]): row[1] for row in rows if row[3] == LISTEN}


def listening_of(pids: Iterable[int]) -> dict[int, str]:
    """The part of `listening` that these processes hold; of one that is gone, nothing."""
    held = {inode for pid in pids for inode in _sockets(pid)}
    return {inode: address for inode, address in listening().items() if inode in held}


def _sockets(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(OSError):  # the process is gone
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
                target = os.readlink(link)
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


def still_listening(before: Iterable[int]) -> list[str]:
    """Addresses of those of the sockets `before` that are still listened on."""
    now = listening()
    return [f"port {now[inode]}" for inode in before if inode in now]
