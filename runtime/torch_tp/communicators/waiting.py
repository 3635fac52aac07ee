"""When to stop waiting for a peer: it is dead, it has left, the epoch was fenced, or the deadline has passed."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence

from runtime.torch_tp.communicators.interface import CollectiveTimeout, PeerLost


class PeerWatch:
    """Looks at the members of a group of one host. Cheap enough (a few us) to be asked every few hundred microseconds of waiting.

    Dead peers are seen by process descriptors, which also notice those whose parent has not reaped them yet and are safe
    against reused pids. `labels` are the members' rank ids, for messages.
    """

    def __init__(self, labels: Sequence[int], deadline_s: float, is_alive: Callable[[], bool]) -> None:
        self.labels = tuple(labels)
        self.deadline_s = deadline_s
        self.has_left: Callable[[int], bool] = lambda rank: False
        self.is_alive = is_alive
        self._poll = select.epoll()
        self._rank_of: dict[int, int] = {}
        self._suspects: set[tuple[int, int]] = set()

    def add(self, rank: int, pid: int) -> None:
        """Begin to watch the process of a peer. Raises: PeerLost when it is gone already."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise PeerLost(f"rank {self.labels[rank]} (pid {pid}) died while the group was being built") from error
        self._rank_of[descriptor] = rank
        self._poll.register(descriptor, select.EPOLLIN)

    def look_around(self, waited_s: float, missing: int, what: str) -> None:
        """Return if it is worth waiting on for rank `missing`. Raises: PeerLost, CollectiveTimeout."""
        if not self.is_alive():
            raise PeerLost(f"{what}: this epoch was fenced while waiting for rank {self.labels[missing]}")
        for descriptor, _ in self._poll.poll(0) if not self._poll.closed else ():
            raise PeerLost(f"{what}: the process of rank {self.labels[self._rank_of[descriptor]]} is dead")
        if self.has_left(missing):
            # it may have published what we wait for and then left: one more look at the flag comes first
            suspect = (threading.get_ident(), missing)
            if suspect in self._suspects:
                raise PeerLost(f"{what}: rank {self.labels[missing]} has left the group")
            self._suspects.add(suspect)
        if waited_s > self.deadline_s:
            raise CollectiveTimeout(
                f"{what}: rank {self.labels[missing]} did not come within deadline_s={self.deadline_s:g}; it is frozen or far too slow"
            )

    def close(self) -> None:
        for descriptor in self._rank_of:
            os.close(descriptor)
        self._rank_of.clear()
        self._poll.close()
