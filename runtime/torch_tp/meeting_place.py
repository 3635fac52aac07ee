"""Where the ranks of a group find each other: nowhere in particular on one host, else at a rendezvous store, which is kept alive."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from runtime.torch_tp.group_values import RankSettings, SupervisorSettings
from runtime.torch_tp.rendezvous import RendezvousProcess
from runtime.torch_tp.worker_link import WorkerLink

logger = logging.getLogger(__name__)


class MeetingPlace:
    """Groups inside one host meet in shared memory; all others need the store. Its process is its own, so that no rank owns it."""

    def __init__(self, settings: SupervisorSettings, ranks: Sequence[RankSettings]) -> None:
        self._settings = settings
        self._store: RendezvousProcess | None = None
        self._late_s = float("inf")
        hosts = {rank.node for rank in ranks} | {index for index, rank in enumerate(ranks) if rank.is_remote}
        self.may_need_store = len(hosts) > 1 or self._needs_network(ranks)

    def _needs_network(self, ranks: Sequence[RankSettings]) -> bool:
        return self._settings.communicator not in ("auto", "shm") or any(rank.device != "cpu" for rank in ranks)

    def open(self) -> None:
        """Start the store."""
        self._store = RendezvousProcess(self._settings.listen_host or "127.0.0.1")

    def watch(self) -> None:
        """A dead store harms no group that stands; the next one meets at a new one."""
        if self._store is not None and not self._store.is_alive:
            logger.warning("rendezvous store died pid=%d; starting another", self._store.pid)
            self._store.close()
            self.open()

    def address_for(self, links: Sequence[WorkerLink]) -> tuple[str, int] | None:
        """Where a group of these meets; ("", 0) where it needs no store; None while the store has not told yet."""
        if len(links) < 2 or (len({link.node for link in links}) == 1 and not self._needs_network([link.settings for link in links])):
            return "", 0
        assert self._store is not None
        try:
            address = self._store.address(0.0)
        except (TimeoutError, RuntimeError):
            return None
        self._late_s = float("inf")
        return address

    def is_late(self, now_s: float) -> bool:
        """Whether the store has been waited for too long, counted from the first time this is asked."""
        self._late_s = min(self._late_s, now_s + self._settings.start_deadline_s)
        return now_s > self._late_s

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
