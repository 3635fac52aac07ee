"""How ranks that copy KV ahead end together: with every exchange each tells all others whether it can go on.

A rank that fails alone would leave the others waiting for what it does not send, and what they have sent in the way of whatever is
exchanged next. So it still takes part in the exchange after its failure, with zeros, and all leave after that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from runtime.torch_tp.communicators.interface import CollectiveTimeout, Communicator, PeerLost


class CopyEnded(RuntimeError):
    """Another rank could not go on; this one has stopped at the same place."""


class CopyAccord:
    """One rank's word in one copy. error: why this rank cannot go on."""

    def __init__(self, communicator: Communicator, dtype: torch.dtype, device: torch.device) -> None:
        self.error: Exception | None = None
        self._communicator = communicator
        self._dtype, self._device = dtype, device

    @contextmanager
    def noting(self) -> Iterator[None]:
        """What fails in here is told with the next exchange."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]] = (), receives: Sequence[tuple[int, torch.Tensor]] = ()) -> None:
        """Exchange these and how each rank fares. Raises: PeerLost, CollectiveTimeout; what this rank failed of; CopyEnded."""
        communicator = self._communicator
        peers = [peer for peer in range(communicator.size) if peer != communicator.rank]
        own = torch.full((1,), float(self.error is not None), dtype=self._dtype, device=self._device)
        told = [torch.empty_like(own) for _ in peers]
        if peers:
            try:
                communicator.exchange([*sends, *((peer, own) for peer in peers)], [*receives, *zip(peers, told, strict=True)])
            except (PeerLost, CollectiveTimeout):
                raise
            except Exception as error:  # somewhere in mid-message: only a new group is in step again
                raise PeerLost(f"a bulk move broke off, {type(error).__name__}: {error}") from error
        self.raise_if_failed()
        failed = [peer for peer, word in zip(peers, told, strict=True) if word.item()]
        if failed:
            raise CopyEnded(f"rank {failed[0]} could not go on with the copy; nothing was changed")

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error
