"""safetensors files as memory-mapped views.

The `safetensors` package reads whole tensors; here every rank views the same mapped pages, so a weight exists once per host
and any slice of it is free.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from runtime.torch_tp.config import CheckpointError

DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
HEADER_BYTES_MAX = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One mapped file. The mapping is private (copy on write), so nothing written by mistake reaches the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = read_header(path)
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> Tensor:
        """A view on the mapped bytes; never a copy, except where the file put the tensor at an odd address."""
        entry = self.entries[name]
        if entry.bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.start % entry.dtype.itemsize:
            part = bytearray(self._map[entry.start : entry.start + entry.bytes])
            return torch.frombuffer(part, dtype=entry.dtype).view(entry.shape)
        return torch.frombuffer(self._map, dtype=entry.dtype, count=prod(entry.shape), offset=entry.start).view(entry.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Name → entry of every tensor. Raises CheckpointError, in one line, for whatever is wrong with the file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(HEADER_BYTES_MAX, size - 8):
                raise CheckpointError(f"{path}: not a safetensors file, or cut short ({size} bytes, header of {length}); fetch it again")
            header = json.loads(file.read(length))
        entries = {name: _entry(value, 8 + length) for name, value in header.items() if name != "__metadata__"}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: the safetensors header is damaged ({type(error).__name__}: {error}); fetch the file again"
        ) from error
    end = max((entry.start + entry.bytes for entry in entries.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path}: cut short, {size} bytes of {end}; fetch the file again")
    return entries


def _entry(value: dict[str, object], data_start: int) -> TensorEntry:
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not isinstance(offsets, list) or any(not isinstance(n, int) or n < 0 for n in shape + offsets):
        raise ValueError(f"shape {shape!r} and data_offsets {offsets!r} must be lists of whole numbers")
    entry = TensorEntry(DTYPES[str(dtype)], tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != entry.bytes:
        raise ValueError(f"a tensor of shape {shape} and {dtype} needs {entry.bytes} bytes, data_offsets give {offsets[1] - offsets[0]}")
    return entry
