"""Files that are replaced in one step: a kill or a power cut at any moment leaves the old content or the new, both complete. And read so
that a path from elsewhere (a device, a pipe, a disk's image) costs neither memory nor time."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` beside `path`, force it to disk, rename it over `path`, and force the rename to disk too."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def read_plain_file(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    """Content of a regular file of at most `bytes_max` bytes. Raises: OSError for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error)) from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a plain file")
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"is larger than {bytes_max} bytes")
    return data


def sync_folder(folder: Path) -> None:
    """Force to disk what was made, renamed or deleted in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
