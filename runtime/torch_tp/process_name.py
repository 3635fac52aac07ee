"""What `ps -o comm` and `top` call a process: one that was forked has the command line of whoever forked it."""

from __future__ import annotations

import contextlib
from pathlib import Path

NAME_BYTES_MAX = 15  # the kernel cuts what is longer


def name_process(name: str) -> None:
    """Call in the main thread. Does nothing where the system has no such thing."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(name.encode()[:NAME_BYTES_MAX])


def process_name(pid: int) -> str:
    """ "" where it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""
