"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from envs.traces.trace_row import TraceError


@contextlib.contextmanager
def whole_file(path: Path, overwrite: bool = False) -> Iterator[IO[bytes]]:
    """Write to a temporary neighbour and rename it on success; on any error nothing is left behind.

    Raises TraceError when the folder is absent or not writable, or the file exists and `overwrite` is False.
    """
    if path.exists() and not overwrite:
        raise TraceError(f"{path}: exists already; choose another name, or --force")
    if not path.parent.is_dir():
        raise TraceError(f"{path}: folder {path.parent} does not exist; make it first")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as fault:
        raise TraceError(f"{path}: cannot be written ({fault.strerror}); check the folder's permissions") from fault
    try:
        with os.fdopen(handle, "wb") as raw:
            yield raw
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def whole_text_file(path: Path, overwrite: bool = False) -> Iterator[IO[str]]:
    """The same for UTF-8 text; a name that ends in .gz or .zst is compressed."""
    with whole_file(path, overwrite) as raw:
        if path.suffix == ".gz":  # no time in the header, so equal rows give equal bytes
            with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed, io.TextIOWrapper(packed, "utf-8") as text:
                yield text
        elif path.suffix == ".zst":
            import zstandard

            with (
                zstandard.ZstdCompressor().stream_writer(raw, closefd=False) as packed,
                io.TextIOWrapper(packed, "utf-8") as text,
            ):
                yield text
        else:
            text = io.TextIOWrapper(raw, "utf-8")
            yield text
            text.detach()  # flushes, and leaves closing to whole_file
