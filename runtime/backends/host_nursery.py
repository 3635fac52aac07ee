"""The service's own nursery: it has imported what group hosts and their ranks need, and forks a host in milliseconds.

Each host is forked together with a nursery for its ranks, so that one process has imported torch for the whole service. Hosts outlive
this process, should it alone be lost: they end with the gateway.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from runtime.torch_tp import nursery
from runtime.torch_tp.parent_death import wake_with_parent

PRELOADED = ("runtime.backends.group_host", *nursery.PRELOADED)


class HostNursery(nursery.Nursery):
    """The gateway's half. `fork` may take long where the nursery is stopped; `poll` of what it forked, and `reap`, never do."""

    PROGRAM: ClassVar = "runtime.backends.host_nursery"
    FOLDER: ClassVar = None  # of the gateway: a model's path may be relative to it
    FORK_DEADLINE_S: ClassVar = 3.0

    def reap(self, pid: int) -> int:
        """Without waiting for it, on the event loop as this is, and so without knowing the code."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(msgspec.msgpack.encode(["let_go", pid]), socket.MSG_DONTWAIT)
        return -signal.SIGKILL


def become_host(arguments: Sequence[str], descriptors: Sequence[int], parent_pid: int) -> int:
    from runtime.backends import group_host

    wake_with_parent()
    own = nursery.Nursery.forked(not_its=descriptors)
    descriptor, group = arguments
    return group_host.main(int(descriptor), group, own)


if __name__ == "__main__":
    nursery.main(preloaded=PRELOADED, become=become_host)
