"""Names of shared-memory files: whose they are, and which of them are left over from an owner that is dead.

A name holds the controller's pid and start time, and the epoch. A segment is unlinked as soon as every rank has mapped it,
so that a death at any later moment leaves nothing; what a death before that leaves is swept away by name, since its owner
is no more.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_NAME = re.compile(r"ballast-(\d+)-(\d+)-e\d+-[\w.-]+")


def is_segment_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


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
