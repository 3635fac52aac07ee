"""A file in shared memory that holds the KV of one request while it goes from one engine to another on the same host. No torch.

The engine that gives it makes the file and takes its name away when the request leaves; should that engine die first, whoever sweeps
up after it finds the owner in the name (`segment_names`).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from runtime.torch_tp.communicators.segment_names import is_segment_name, segment_folder

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvFile:
    """Laid out [layer][keys, values][KV head][token][head_dim], whatever plans its writers and readers have. tokens: it has room for."""

    name: str
    layers: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if not is_segment_name(self.name):
            raise ValueError(f"KvFile {self.name!r}: make the name with segment_name(), so that it can be swept when its owner dies")
        if self.dtype not in NUMBER_BYTES:
            raise ValueError(f"KvFile {self.name!r}: dtype {self.dtype!r} unknown; known: {', '.join(NUMBER_BYTES)}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.layers, 2, self.kv_heads, self.tokens, self.head_dim

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * NUMBER_BYTES[self.dtype]

    @property
    def kind(self) -> tuple[int, int, int, str]:
        """What two engines must agree on."""
        return self.layers, self.kv_heads, self.head_dim, self.dtype

    def create(self) -> None:
        """Raises: OSError when the memory is not to be had; nothing is left then."""
        path, total = segment_folder() / self.name, self.tokens * self.token_bytes
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # reserved now: writing to a page that a full /dev/shm cannot back would be a SIGBUS instead of an error
            os.posix_fallocate(handle, 0, total)
        except OSError as error:
            self.remove()
            raise OSError(error.errno, f"no {total} bytes of shared memory for KV ({error.strerror}); enlarge /dev/shm") from error
        finally:
            os.close(handle)

    def mapped(self) -> mmap.mmap:
        """Its bytes, which stay while the map lives, also without the name. Raises: OSError when it is gone, ValueError for another
        size."""
        handle = os.open(segment_folder() / self.name, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            if size != self.tokens * self.token_bytes:
                raise ValueError(f"KV file {self.name} has {size} bytes instead of {self.tokens * self.token_bytes}")
            return mmap.mmap(handle, size)
        finally:
            os.close(handle)

    def remove(self) -> None:
        """Take its name away; may be called twice."""
        (segment_folder() / self.name).unlink(missing_ok=True)
