"""What the gateway's process gives back once it has started: it needs the kernels' compiler to load them, and never again.

Without this a collection of garbage goes over the compiler's 150,000 objects each time (0.1 s, in the middle of somebody's stream).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import sys
from collections.abc import Iterable, Iterator

logger = logging.getLogger(__name__)

COMPILER = "libllvmlite"


def do_without_scipy() -> None:
    """numba loads scipy's linear algebra for its own where it is installed: 15 MiB that no kernel of ours uses. Call before they load."""
    sys.modules.setdefault("scipy.linalg", None)  # type: ignore[arg-type]


def give_back() -> None:
    """Call when all kernels are loaded. What is alive now is left out of later collections; free memory and the compiler's clean pages go
    back to the system: they are read again from its file in the unlikely case."""
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError):  # of glibc alone
        libc.malloc_trim(0)
    try:
        with open("/proc/self/smaps") as smaps:
            stretches = list(clean_stretches(smaps, COMPILER))
    except OSError:
        return  # another system than Linux
    for start, size in stretches:
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED) != 0:
            logger.info("pages not given back errno=%s", ctypes.get_errno())


def clean_stretches(smaps: Iterable[str], name: str) -> Iterator[tuple[int, int]]:
    """(address, bytes) of mappings of a file whose name begins with `name` that nobody can write and nobody has changed: what was changed
    once (by the loader, say) is not in the file, and would be lost. smaps: lines of /proc/PID/smaps."""
    start = size = 0
    for line in smaps:
        key, *words = line.split()
        if not key.endswith(":"):
            begin, _, end = key.partition("-")
            is_named = len(words) == 5 and words[4].rpartition("/")[2].startswith(name)
            start, size = (int(begin, 16), int(end, 16) - int(begin, 16)) if is_named and "w" not in words[0] else (0, 0)
            dirty = 0
        elif key in ("Private_Dirty:", "Shared_Dirty:", "Anonymous:", "Swap:"):
            dirty += int(words[0])
        elif key == "VmFlags:" and size and not dirty:
            yield start, size
