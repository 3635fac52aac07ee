"""The service's own nursery: it has imported what group hosts and their ranks need, and forks a host in milliseconds.

Each host is forked together with a nursery for its ranks, so that one process has imported torch for the whole service. Hosts outlive
this process, should it alone be lost: they end with the gateway.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from runtime.torch_tp import nursery_process
from runtime.torch_tp.nursery import Nursery

PRELOADED = ("runtime.backends.group_host", *nursery_process.PRELOADED)


class HostNursery(Nursery):
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
    """arguments: as those of a host that is an interpreter of its own."""
    from runtime.backends import group_host

    descriptor, gateway_pid, group = arguments
    gateway = os.pidfd_open(int(gateway_pid))  # which our parent, the nursery, may not live to see the end of
    own = Nursery.forked(descriptors, gateway)
    os.close(gateway)
    return group_host.main(int(descriptor), group, own)


if __name__ == "__main__":
    nursery_process.main(preloaded=PRELOADED, become=become_host)
