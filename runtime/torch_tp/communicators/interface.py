"""What a group of ranks can do together, and the ways in which it fails. How the bytes travel is left to the modules beside this one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
KINDS = ("auto", "shm", "tcp", "gloo", "nccl", "cuda_ipc", "hierarchical")


class PeerLost(RuntimeError):
    """A member of the group is gone (dead, left, or fenced): this epoch's group is of no more use."""


class CollectiveTimeout(RuntimeError):
    """A collective did not finish within its deadline though no member is known to be dead."""


class Pending(Protocol):
    """An all-reduce that has been started; the tensor holds the sum once `wait` has returned."""

    def wait(self) -> None:
        """Raises: PeerLost, CollectiveTimeout."""
        ...


class PendingSwap(Protocol):
    """A gather of equally long byte vectors that has been started."""

    def wait(self) -> list[Tensor]:
        """All ranks' vectors in rank order. Raises: PeerLost, CollectiveTimeout."""
        ...


class Communicator(Protocol):
    """The collectives of one epoch. `rank` counts from 0 to `size` - 1 in the order of the members.

    Every rank makes the same calls in the same order, `wait`s included, from one thread; `exchange` is an order of its own and may
    come from another. After PeerLost or CollectiveTimeout only `close` is
    allowed: what the tensor holds is undefined.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """In-place sum over the ranks, the same bits on every rank. Raises: PeerLost, CollectiveTimeout."""
        ...

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Begin a sum and go on computing. Sums end in the order in which they began."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks in rank order; all dimensions but the last must agree, as must the dtype."""
        ...

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Move (peer, tensor) pairs in paced chunks beside the steps; the n-th send to a peer meets its n-th receive from us."""
        ...

    def close(self) -> None:
        """Leave the group: peers that still wait for this rank get PeerLost. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[Result]):
    """A Pending (or PendingSwap) whose result is already there."""

    result: Result

    def wait(self) -> Result:
        return self.result


class Ending:
    """A Pending that ends by a call, the first time that it is waited for."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def wait(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """All that a communicator needs to know to be built; see `build_communicator`."""

    epoch: int
    rank: int
    members: tuple[int, ...]
    domains: tuple[tuple[int, ...], ...]
    store_address: tuple[str, int] | None
    segment_names: tuple[str, ...]
    deadline_s: float
    is_alive: Callable[[], bool]
    torch_device: torch.device
    between: str = "tcp"
    wire: str = "float32"
    measures: bool = False

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"members={self.members}: give each rank of the group once, at least one")
        if self.rank not in self.members:
            raise ValueError(f"rank={self.rank} is not among members={self.members}")
        if sorted(rank for domain in self.domains for rank in domain) != sorted(self.members) or not all(self.domains):
            raise ValueError(f"domains={self.domains} must hold each of members={self.members} exactly once, and none may be empty")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s={self.deadline_s}: must be positive")

    @property
    def own_index(self) -> int:
        """Where `rank` stands among the members: the communicator's own rank."""
        return self.members.index(self.rank)


# lazily imported: a worker that uses shared memory only must not pay for the others
_FACTORIES = {
    "shm": ("runtime.torch_tp.communicators.shared_memory", "build"),
    "tcp": ("runtime.torch_tp.communicators.tcp", "build"),
    "gloo": ("runtime.torch_tp.communicators.gloo", "build"),
    "nccl": ("runtime.torch_tp.communicators.nccl", "build"),
    "cuda_ipc": ("runtime.torch_tp.communicators.cuda_ipc", "build"),
    "hierarchical": ("runtime.torch_tp.communicators.hierarchical", "build"),
    "serial": ("runtime.torch_tp.communicators.serial", "build"),
}


def kind_for(domains: Sequence[Sequence[int]], device: torch.device) -> str:
    """What "auto" stands for: one host shares memory, several use the network as well, and one rank needs neither."""
    if sum(len(domain) for domain in domains) == 1:
        return "serial"
    if len(domains) == 1:
        return "nccl" if device.type == "cuda" else "shm"
    if max(len(domain) for domain in domains) > 1 and device.type == "cpu":
        return "hierarchical"
    return "nccl" if device.type == "cuda" else "tcp"


def build_communicator(
    kind: str,
    *,
    epoch: int,
    rank: int,
    members: Sequence[int],
    domains: Sequence[Sequence[int]] | None = None,
    store_address: tuple[str, int] | None = None,
    segment_names: Sequence[str] = (),
    deadline_s: float = 10.0,
    is_alive: Callable[[], bool] = lambda: True,
    torch_device: torch.device | str = "cpu",
    between: str = "tcp",
    wire: str = "float32",
) -> Communicator:
    """The communicator of one epoch; every member calls this at about the same time and returns when all are connected.

    Args:
        kind: one of KINDS.
        epoch: grows with every rebuild; the store's keys and the segments' names hold it, so that a late rank meets nobody.
        rank, members: rank ids of the whole engine; the communicator's own `rank` is the position among `members`.
        domains: the members by host (communication domain); None means that all share one.
        store_address: host and port of the rendezvous store; not needed for "shm".
        segment_names: one per domain, see `segment_names.segment_name`.
        deadline_s: for each collective, and for the building itself.
        is_alive: False ends every wait with PeerLost within a millisecond or so (fencing).
        between, wire: what joins the leaders of domains ("tcp", "gloo") and how sums cross there ("float32", "fp16", "int8": see
            `wire_codec` for their error). "auto" also measures whether sums of a size are cheaper flat, which takes some 0.1 s.
    Raises: ValueError for settings that do not fit together; PeerLost or CollectiveTimeout when a member does not come.
    """
    if kind not in KINDS:
        raise ValueError(f"communicator kind {kind!r} unknown; known: {', '.join(KINDS)}")
    device = torch.device(torch_device)
    cut = tuple(tuple(domain) for domain in domains) if domains is not None else (tuple(members),)
    settings = GroupSettings(
        epoch, rank, tuple(members), cut, store_address, tuple(segment_names), deadline_s, is_alive, device, between, wire, kind == "auto"
    )
    module, function = _FACTORIES[kind_for(cut, device) if kind == "auto" or len(settings.members) == 1 else kind]
    built: Communicator = getattr(importlib.import_module(module), function)(settings)
    return built
