"""A shared-memory file that all ranks of one host map; how they meet in it, and that its name is gone as soon as they have."""

from __future__ import annotations

import ctypes
import mmap
import os
import time

import numpy as np

from runtime.torch_tp.communicators.segment_names import is_segment_name, segment_folder
from runtime.torch_tp.communicators.shared_flags import FLAG_BYTES, read_flag, write_flag
from runtime.torch_tp.communicators.waiting import PeerWatch

HEADER_BYTES = 8192
MEMBERS_MAX = HEADER_BYTES // FLAG_BYTES - 1
_ATTACH_NAP_S = 0.0002


class Segment:
    """A file that `size` ranks have mapped. `address` is where its `payload_bytes` begin (zeroed, page aligned) in this process."""

    def __init__(self, name: str, rank: int, size: int, payload_bytes: int) -> None:
        """Raises: ValueError for a foreign name or too many ranks; OSError when the memory is not to be had (a small /dev/shm)."""
        if not is_segment_name(name):
            raise ValueError(f"segment name {name!r}: make it with segment_name(), so that it can be swept when its owner dies")
        if size > MEMBERS_MAX:
            raise ValueError(f"{size} ranks share a segment; at most {MEMBERS_MAX}")
        self.path = segment_folder() / name
        self.rank, self.size = rank, size
        total = HEADER_BYTES + payload_bytes
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # reserved now: writing to a page that a full /dev/shm cannot back would be a SIGBUS instead of an error
            os.posix_fallocate(handle, 0, total)
            self._map = mmap.mmap(handle, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise OSError(error.errno, f"no {total} bytes of shared memory at {self.path} ({error.strerror}); enlarge /dev/shm") from error
        finally:
            os.close(handle)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self._base = int(self.bytes.ctypes.data)
        self.address = self._base + HEADER_BYTES
        self.offset = HEADER_BYTES

    def _line(self, rank: int) -> int:
        return self._base + FLAG_BYTES * (1 + rank)

    def attach(self, watch: PeerWatch) -> None:
        """Tell the others that this rank has mapped the file, wait for all, and take its name away."""
        write_flag(self._line(self.rank), os.getpid())
        begin_s = time.monotonic()
        try:
            for rank in range(self.size):
                while not (pid := read_flag(self._line(rank))):
                    time.sleep(_ATTACH_NAP_S)
                    watch.look_around(time.monotonic() - begin_s, rank, f"mapping of segment {self.path.name}")
                if rank != self.rank:
                    watch.add(rank, pid)
        finally:
            # all have it, or the group will not come to be
            self.path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Tell the others that nothing more will come from this rank."""
        write_flag(self._line(self.rank) + 8, 1)

    def has_left(self, rank: int) -> bool:
        return bool(read_flag(self._line(rank) + 8))


def shorten_naps() -> None:
    """Let this thread's short sleeps end on time (the kernel may add 50 us otherwise). Best effort: only speed depends on it."""
    timer_slack = 29  # PR_SET_TIMERSLACK
    ctypes.CDLL(None).prctl(timer_slack, 1000, 0, 0, 0)
