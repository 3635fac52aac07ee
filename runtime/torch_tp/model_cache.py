"""Models converted once for all ranks and runs: a directory per source file and conversion, made whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from runtime.torch_tp.config import CheckpointError

WAIT_FOR_OTHER_S = 600.0


def cache_root() -> Path:
    """Where converted models live: $BALLAST_CACHE, else ballast/ in the user's cache directory."""
    stated = os.environ.get("BALLAST_CACHE")
    if stated:
        return Path(stated)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ballast"


def cached_folder(source: Path, version: object, make: Callable[[Path], None]) -> Path:
    """The directory that `make` fills from `source`; one process makes it, others wait for it.

    A source is known by path, size and time of change; `version` names the conversion. Raises: CheckpointError when the source
    cannot be read, when another process does not finish in ten minutes, and whatever `make` raises (nothing is left then).
    """
    try:
        stat = source.stat()
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read ({error.strerror})") from error
    mark = f"{source.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{version}"
    target = cache_root() / f"{source.stem}-{hashlib.sha256(mark.encode()).hexdigest()[:16]}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(target.name + ".lock"), "w") as lock:
            _lock(lock.fileno(), target)
            if not target.is_dir():
                _make(target, make)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error.strerror}); make room, or set BALLAST_CACHE") from error
    return target


def _make(target: Path, make: Callable[[Path], None]) -> None:
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        make(partial)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _lock(descriptor: int, target: Path) -> None:
    deadline_s = time.monotonic() + WAIT_FOR_OTHER_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise CheckpointError(f"{target}: another process has been making it for {WAIT_FOR_OTHER_S:.0f} s; stop it") from None
            time.sleep(0.05)
