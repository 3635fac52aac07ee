"""A group of ranks as threads of one process, for tests of what uses a communicator: same contract, no shared memory, no sockets."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from runtime.torch_tp.communicators.bulk_thread import check_pairs
from runtime.torch_tp.communicators.interface import CollectiveTimeout, Done, PeerLost, Pending
from runtime.torch_tp.communicators.rank_order import sum_in_rank_order


class FakeGroup:
    """What the ranks share."""

    def __init__(self, size: int, deadline_s: float) -> None:
        self.size, self.deadline_s = size, deadline_s
        self.barrier = threading.Barrier(size)
        self.parts: list[Tensor | None] = [None] * size
        self.mail: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self.mail_changed = threading.Condition()
        self.lost: set[int] = set()

    def lose(self, rank: int) -> None:
        """As if this rank had been killed: whoever waits for it now or later gets PeerLost."""
        self.lost.add(rank)
        self.barrier.abort()
        with self.mail_changed:
            self.mail_changed.notify_all()

    def take_mail(self, sender: int, receiver: int) -> Tensor:
        """The oldest message of a pair, waited for; `mail_changed` is held."""
        box = self.mail[sender, receiver]
        if not self.mail_changed.wait_for(lambda: bool(box or self.lost), self.deadline_s):
            raise CollectiveTimeout(f"exchange: nothing came from rank {sender} within deadline_s={self.deadline_s:g}")
        if not box:
            raise PeerLost(f"ranks {sorted(self.lost)} are lost")
        return box.pop(0)


class FakeCommunicator:
    """One rank of a FakeGroup."""

    def __init__(self, group: FakeGroup, rank: int, is_alive: Callable[[], bool] = lambda: True) -> None:
        self.rank, self.size = rank, group.size
        self._group, self._is_alive = group, is_alive
        self.reduced_bytes = 0  # of all step sums so far: tests of traffic read it

    def _meet(self) -> None:
        if not self._is_alive():
            raise PeerLost("this epoch was fenced")
        try:
            self._group.barrier.wait(self._group.deadline_s)
        except threading.BrokenBarrierError as error:
            if self._group.lost:
                raise PeerLost(f"ranks {sorted(self._group.lost)} are lost") from error
            raise CollectiveTimeout(f"a rank did not come within deadline_s={self._group.deadline_s:g}") from error

    def _share(self, tensor: Tensor) -> list[Tensor]:
        self._group.parts[self.rank] = tensor.detach().clone()
        self._meet()
        parts = [part for part in self._group.parts if part is not None]
        self._meet()
        return parts

    def all_reduce(self, tensor: Tensor) -> None:
        self.reduced_bytes += tensor.nbytes
        tensor.copy_(sum_in_rank_order(self._share(tensor)))

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        self.all_reduce(tensor)
        return Done(None)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._share(tensor if tensor.dim() else tensor.reshape(1))

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        check_pairs(sends, receives, self.rank, self.size)
        group = self._group
        with group.mail_changed:
            for peer, tensor in sends:
                group.mail[self.rank, peer].append(tensor.detach().clone())
            group.mail_changed.notify_all()
            for peer, tensor in receives:
                tensor.copy_(group.take_mail(peer, self.rank).reshape(tensor.shape))

    def close(self) -> None:
        self._group.lose(self.rank)


def fake_group(size: int, deadline_s: float = 60.0) -> list[FakeCommunicator]:
    """Communicators for `size` threads."""
    group = FakeGroup(size, deadline_s)
    return [FakeCommunicator(group, rank) for rank in range(size)]
