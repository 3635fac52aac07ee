"""Sums over several hosts: reduced in each domain through shared memory, exchanged between the domains' leaders, broadcast in the domain.

Only one rank per domain uses the slow link, with one message per sum. Sums are formed in rank order inside a domain and
then in the order of the domains; another cut into domains may therefore give other last bits, but the ranks of one group
always agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from runtime.torch_tp.communicators.bulk_thread import check_pairs
from runtime.torch_tp.communicators.gloo import GlooCommunicator
from runtime.torch_tp.communicators.interface import Communicator, Ending, GroupSettings, Pending, PendingSwap
from runtime.torch_tp.communicators.shared_memory import SharedMemoryCommunicator
from runtime.torch_tp.communicators.tcp import TcpCommunicator
from runtime.torch_tp.communicators.wire_codec import WireCodec, codec_of
from runtime.torch_tp.link_cost import LinkCost
from runtime.torch_tp.link_probe import probe

LEADER = 0  # rank in its domain


@dataclass(frozen=True, slots=True)
class CheaperWay:
    """Flat or hierarchical, whichever the measured alpha and beta say is cheaper for the size; all ranks hold the same figures."""

    costs: Mapping[str, LinkCost]

    def __call__(self, size_bytes: int) -> str:
        return min(self.costs, key=lambda way: (self.costs[way].time_s(size_bytes), way))


class SwappingCommunicator(Communicator, Protocol):
    """What the leaders need besides: gathers of equally long byte vectors, for packed sums."""

    def swap(self, own: Tensor) -> list[Tensor]: ...
    def start_swap(self, own: Tensor) -> PendingSwap: ...


class HierarchicalCommunicator:
    """`domain` joins the ranks of this host, `leaders` (on leaders only) the first rank of each host, `flat` all ranks.

    `flat` also carries bulk moves between hosts. A domain of one rank has no `domain`.
    """

    def __init__(
        self,
        members: Sequence[int],
        domains: Sequence[Sequence[int]],
        rank: int,
        domain: SharedMemoryCommunicator | None,
        leaders: SwappingCommunicator | None,
        flat: Communicator,
        codec: WireCodec | None,
    ) -> None:
        self.rank, self.size = members.index(rank), len(members)
        self._index = {member: index for index, member in enumerate(members)}
        self._by_domain = [[self._index[member] for member in cut] for cut in domains]
        self._own = next(cut for cut in self._by_domain if self.rank in cut)
        self._domain, self._leaders, self._flat, self._codec = domain, leaders, flat, codec
        self.way: Callable[[int], str] = lambda size_bytes: "hierarchical"

    def measure(self) -> dict[str, LinkCost]:
        """Time both ways (called by all ranks alike) and take the cheaper one for each size from now on."""
        costs = probe({"flat": self._flat, "hierarchical": _AlwaysHierarchical(self)})
        self.way = CheaperWay(costs)
        return costs

    def all_reduce(self, tensor: Tensor) -> None:
        if self.way(tensor.nbytes) == "flat":
            self._flat.all_reduce(tensor)
        else:
            self.reduce_by_domains(tensor)

    def reduce_by_domains(self, tensor: Tensor) -> None:
        """Reduce, exchange, broadcast. (In parts, one crossing while the next is reduced, 1 MiB took longer on loopback.)"""
        if self._domain is not None:
            self._domain.reduce_to(LEADER, tensor)
        if self._leaders is not None:
            with self._telling_the_domain():
                if self._codec is None:
                    self._leaders.all_reduce(tensor)
                else:
                    self._unpack_into(tensor, self._leaders.swap(self._pack(tensor)))
        if self._domain is not None:
            self._domain.broadcast_from(LEADER, tensor)

    def start_crossing(self, tensor: Tensor) -> Callable[[], None]:
        """Reduce in the domain and begin to cross; what is returned ends the crossing and broadcasts."""
        if self._domain is not None:
            self._domain.reduce_to(LEADER, tensor)
        if self._leaders is None:
            return lambda: self._end_crossing(tensor, None)
        if self._codec is None:
            return partial(self._end_crossing, tensor, self._leaders.start_all_reduce(tensor).wait)
        swap = self._leaders.start_swap(self._pack(tensor))
        return partial(self._end_crossing, tensor, lambda: self._unpack_into(tensor, swap.wait()))

    def _end_crossing(self, tensor: Tensor, arrive: Callable[[], None] | None) -> None:
        if arrive is not None:
            with self._telling_the_domain():
                arrive()
        if self._domain is not None:
            self._domain.broadcast_from(LEADER, tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        assert self._codec is not None
        return self._codec.pack(tensor.reshape(-1).to(torch.float32))

    def _unpack_into(self, tensor: Tensor, packed: Sequence[Tensor]) -> None:
        assert self._codec is not None
        tensor.copy_(self._codec.add_up(packed, tensor.numel()).view(tensor.shape))

    @contextlib.contextmanager
    def _telling_the_domain(self) -> Iterator[None]:
        """A leader that loses the other leaders ends the waiting of its own domain, too."""
        try:
            yield
        except RuntimeError:
            if self._domain is not None:
                self._domain.leave()
            raise

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """The domain's part is done now, the crossing between domains runs on, the broadcast comes with `wait`."""
        if self.way(tensor.nbytes) == "flat":
            return self._flat.start_all_reduce(tensor)
        return Ending(self.start_crossing(tensor))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gathered in the domain, then between leaders, then handed down."""
        own = tensor if tensor.dim() else tensor.reshape(1)
        parts = self._domain.all_gather(own) if self._domain is not None else [own]
        columns = torch.tensor([part.shape[-1] for part in parts])
        together = torch.cat(parts, dim=-1)
        if self._leaders is not None:
            with self._telling_the_domain():
                columns = torch.cat(self._leaders.all_gather(columns))
                together = torch.cat(self._leaders.all_gather(together), dim=-1)
        if self._domain is not None:
            columns = self._domain.all_gather(columns if self._leaders is not None else columns[:0])[LEADER]
            together = self._domain.all_gather(together if self._leaders is not None else together[..., :0])[LEADER]
        in_domain_order = together.split(columns.tolist(), dim=-1)
        order = [index for cut in self._by_domain for index in cut]
        return [in_domain_order[order.index(index)].contiguous() for index in range(self.size)]

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Inside the host through its memory, between hosts over the flat connections."""
        check_pairs(sends, receives, self.rank, self.size)
        if self._domain is not None:
            self._domain.exchange(self._inside(sends), self._inside(receives))
        self._flat.exchange([pair for pair in sends if pair[0] not in self._own], [pair for pair in receives if pair[0] not in self._own])

    def _inside(self, pairs: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        return [(self._own.index(peer), tensor) for peer, tensor in pairs if peer in self._own]

    def close(self) -> None:
        for part in (self._domain, self._leaders, self._flat):
            if part is not None:
                part.close()


class _AlwaysHierarchical:
    """The hierarchical way alone, for the probe."""

    def __init__(self, whole: HierarchicalCommunicator) -> None:
        self._whole = whole
        self.all_gather = whole.all_gather

    def all_reduce(self, tensor: Tensor) -> None:
        self._whole.reduce_by_domains(tensor)


def build(settings: GroupSettings) -> HierarchicalCommunicator:
    """For `build_communicator`; needs the name of this domain's segment if it has more than one rank."""
    number, cut = next((number, cut) for number, cut in enumerate(settings.domains) if settings.rank in cut)
    if len(settings.segment_names) != len(settings.domains):
        raise ValueError(f"one segment name per domain is needed: {len(settings.domains)} domains, segment_names={settings.segment_names}")
    if settings.between not in _BETWEEN:
        raise ValueError(f"between={settings.between!r} unknown; known: {', '.join(_BETWEEN)}")
    codec = codec_of(settings.wire)
    domain: SharedMemoryCommunicator | None = None
    leaders: SwappingCommunicator | None = None
    flat = TcpCommunicator(settings, "flat")
    try:
        if len(cut) > 1:
            name = settings.segment_names[number]
            domain = SharedMemoryCommunicator(name, cut.index(settings.rank), cut, settings.deadline_s, settings.is_alive)
        first = tuple(domain_cut[LEADER] for domain_cut in settings.domains)
        if settings.rank in first:
            leaders = _BETWEEN[settings.between](replace(settings, members=first, domains=(first,)), "leaders")
        whole = HierarchicalCommunicator(settings.members, settings.domains, settings.rank, domain, leaders, flat, codec)
        if settings.measures:
            whole.measure()
    except BaseException:
        for part in (domain, leaders, flat):
            if part is not None:
                part.close()
        raise
    return whole


_BETWEEN: dict[str, Callable[[GroupSettings, str], SwappingCommunicator]] = {"tcp": TcpCommunicator, "gloo": GlooCommunicator}
