"""Named shared-memory files of one host: who owns them, how all ranks map one, and that none is left behind.

A segment's name holds the controller's pid and start time, and the epoch. It is unlinked as soon as every rank has mapped it, so that a death at
any later moment leaves nothing; what a death before that leaves is swept away by name, since its owner is no more.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime.torch_tp.communicators.shared_flags import FLAG_BYTES, read_flag, write_flag
from runtime.torch_tp.communicators.waiting import PeerWatch

logger = logging.getLogger(__name__)

_NAME = re.compile(r"ballast-(\d+)-(\d+)-e\d+-[\w.-]+")
HEADER_BYTES = 8192
MEMBERS_MAX = HEADER_BYTES // FLAG_BYTES - 1
_ATTACH_NAP_S = 0.0002


def segment_folder() -> Path:
    """Memory-backed where the system has it."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: tells it from a later one with the same pid. None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command may hold blanks and parentheses
    return None if fields[0] in "ZX" else int(fields[19])


def segment_name(owner_pid: int, epoch: int, what: str) -> str:
    """The file name for `what` ("step", "domain0", ...) of one epoch of the engine whose controller is `owner_pid`."""
    ticks = start_ticks(owner_pid)
    if ticks is None:
        raise ValueError(f"owner_pid={owner_pid} is not a live process; give the controller's pid")
    return f"ballast-{owner_pid}-{ticks}-e{epoch}-{what}"


def sweep_stale_segments(folder: Path | None = None) -> list[str]:
    """Remove the segments whose owner is dead; returns their names. Others' files are not touched."""
    removed = []
    place = folder if folder is not None else segment_folder()
    for path in place.glob("ballast-*"):
        match = _NAME.fullmatch(path.name)
        if match and start_ticks(int(match[1])) != int(match[2]):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    if removed:
        logger.info("swept stale segments count=%d names=%s", len(removed), ",".join(sorted(removed)))
    return sorted(removed)


class Segment:
    """A file that `size` ranks have mapped. `address` is where its `payload_bytes` begin (zeroed, page aligned) in this process."""

    def __init__(self, name: str, rank: int, size: int, payload_bytes: int) -> None:
        """Raises: ValueError for a foreign name or too many ranks; OSError when the memory is not to be had (a small /dev/shm)."""
        if not _NAME.fullmatch(name):
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
        if self.bytes is not None:
            write_flag(self._line(self.rank) + 8, 1)

    def has_left(self, rank: int) -> bool:
        return bool(read_flag(self._line(rank) + 8))

    def left_flags(self) -> Callable[[int], bool]:
        return self.has_left


def shorten_naps() -> None:
    """Let this thread's short sleeps end on time (the kernel may add 50 us otherwise). Best effort: only speed depends on it."""
    timer_slack = 29  # PR_SET_TIMERSLACK
    ctypes.CDLL(None).prctl(timer_slack, 1000, 0, 0, 0)
