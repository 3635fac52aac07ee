"""Ranks that share one GPU, or GPUs of one host without NCCL: sums through buffers that every rank's process has mapped.

NCCL refuses two ranks on one device; this is how several ranks are tried on a single GPU. Who has published is told through shared memory
on the host, so deadlines, fencing and dead peers are noticed as there; the price is that the host waits for the device at every sum.
UNVERIFIED: has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from runtime.torch_tp.communicators import shared_memory
from runtime.torch_tp.communicators.interface import Done, GroupSettings, Pending
from runtime.torch_tp.communicators.rank_order import sum_in_rank_order

SLOTS = 2
"""A rank writes a slot again two sums later, when all have met once in between and have therefore read it."""

CHUNK_BYTES = 8 * 1024 * 1024


class _DeviceLane:
    """`parts[rank]` is that rank's buffer, as bytes on the device."""

    def __init__(self, host: shared_memory.SharedMemoryCommunicator, device: torch.device) -> None:
        self._host, self._device = host, device
        own = torch.zeros(SLOTS * CHUNK_BYTES, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        handles = host.all_gather(torch.frombuffer(bytearray(_handle_of(own)), dtype=torch.uint8))
        self.parts = [own if rank == host.rank else _opened(bytes(packed.numpy()), device) for rank, packed in enumerate(handles)]
        self._read = torch.cuda.Event()
        self._turn = 0
        self._here = torch.zeros(1)

    def sum(self, flat: Tensor) -> None:
        """In-place sum of a contiguous one-dimensional tensor over the ranks, in rank order."""
        for chunk in flat.split(CHUNK_BYTES // flat.element_size()):
            begin = self._turn % SLOTS * CHUNK_BYTES
            self._turn += 1
            slots = [part[begin : begin + chunk.nbytes].view(chunk.dtype) for part in self.parts]
            slots[self._host.rank].copy_(chunk)
            self._read.synchronize()  # of the last sum, which may have been on another stream
            torch.cuda.current_stream(self._device).synchronize()
            self._host.all_reduce(self._here)
            chunk.copy_(sum_in_rank_order(slots))
            self._read.record(torch.cuda.current_stream(self._device))


class CudaIpcCommunicator:
    """See the module. Small gathers and bulk moves go through the host's memory."""

    def __init__(self, settings: GroupSettings) -> None:
        if settings.torch_device.type != "cuda":
            raise ValueError(f"kind 'cuda_ipc' got device {settings.torch_device}; use 'shm' for ranks on CPUs")
        self._device = settings.torch_device
        self._host = shared_memory.build(settings)
        self.rank, self.size = self._host.rank, self._host.size
        self._lane = _DeviceLane(self._host, self._device)

    def all_reduce(self, tensor: Tensor) -> None:
        flat = tensor.contiguous().view(-1)
        self._lane.sum(flat)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Done at once: ranks of one device have nothing to overlap a sum with."""
        self.all_reduce(tensor)
        return Done(None)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [part.to(self._device) for part in self._host.all_gather(tensor.cpu())]

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """On a stream of its own, so that it waits for no step and no step for it."""
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            outgoing = [(peer, tensor.cpu()) for peer, tensor in sends]
            landing = [torch.empty(tensor.shape, dtype=tensor.dtype) for _, tensor in receives]
            self._host.exchange(outgoing, [(peer, buffer) for (peer, _), buffer in zip(receives, landing, strict=True)])
            for (_, tensor), buffer in zip(receives, landing, strict=True):
                tensor.copy_(buffer)
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self._host.close()


def _handle_of(tensor: Tensor) -> bytes:
    """What another process needs to map this tensor's memory: numbers and byte strings only, no pickle."""
    storage: Any = tensor.untyped_storage()
    return msgspec.msgpack.encode([list(storage._share_cuda_()), tensor.storage_offset(), tensor.nbytes])


def _opened(packed: bytes, device: torch.device) -> Tensor:
    handle, offset, length_bytes = msgspec.msgpack.decode(packed)
    make: Any = torch.UntypedStorage._new_shared_cuda
    # the exporter numbers devices as it sees them; both see the one they share as theirs
    storage = make(device.index or 0, *handle[1:])
    opened = torch.empty(0, dtype=torch.uint8, device=device)
    return opened.set_(storage, offset, (length_bytes,), (1,))


def build(settings: GroupSettings) -> CudaIpcCommunicator:
    """For `build_communicator`: all members on one host."""
    return CudaIpcCommunicator(settings)
