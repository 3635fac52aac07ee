"""Lines on their way to a disk that may be slow, full or gone: a bounded queue, a thread that writes, files that follow one another.

`put` never waits. What finds the queue full, or cannot be written, is dropped and counted. A line is written whole or not at all, except
by a process that is killed meanwhile: then the last line of the last file is torn, which readers leave out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PERIOD_S = 0.05
BATCH_LINES = 256
RETRY_S = 1.0
"""After a failed write the disk is left alone so long; what comes meanwhile waits in the queue, or is dropped."""
CLOSE_S = 2.0


class LineWriter:
    """Writes items of one `kind` to `folder/KIND-STARTED-NUMBER.jsonl`. encode: an item as a line, in the writer's thread. head: the first
    line of every file. `written` and `dropped` count items."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        started: str,
        head: str,
        encode: Callable[[Any], str],
        file_bytes: int,
        files_max: int,
        queue_max: int,
    ) -> None:
        self.kind, self.written, self.dropped = kind, 0, 0
        self._folder, self._started, self._head, self._encode = folder, started, head, encode
        self._file_bytes, self._files_max, self._queue_max = file_bytes, files_max, queue_max
        self._waiting: deque[Any] = deque()
        self._ending = threading.Event()
        self._descriptor: int | None = None
        self._size = 0
        self._number = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=f"records-{kind}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queue `item`, or drop it. Takes a microsecond, whatever the disk does."""
        if len(self._waiting) >= self._queue_max:
            self.dropped += 1
        else:
            self._waiting.append(item)

    def close(self) -> None:
        """Write what waits, as far as that takes no longer than `CLOSE_S`; the thread of a disk that hangs is left to the process's end."""
        self._ending.set()
        self._thread.join(CLOSE_S)
        self.dropped += len(self._waiting)
        self._waiting.clear()

    # --- the thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            is_ending = self._ending.wait(PERIOD_S)
            while self._waiting and self._write_batch():
                pass
            if is_ending:
                self._end_file()
                return

    def _write_batch(self) -> bool:
        """Whether it was written."""
        taken = [self._waiting.popleft() for _ in range(min(BATCH_LINES, len(self._waiting)))]
        lines = [line for item in taken if (line := self._line(item)) is not None]
        data = "".join(lines).encode()
        try:
            self._ready_file(len(data))
            self._write(data)
        except OSError as error:
            self.dropped += len(lines)
            if not self._has_failed:
                logger.warning("records are dropped kind=%s reason=%s", self.kind, error)
            self._has_failed = True
            self._ending.wait(RETRY_S)
            return False
        self.written += len(lines)
        if self._has_failed:
            logger.warning("records are written again kind=%s dropped=%d", self.kind, self.dropped)
        self._has_failed = False
        return True

    def _line(self, item: Any) -> str | None:
        try:
            return self._encode(item) + "\n"
        except Exception as error:  # one record that cannot be written must not stop the others
            self.dropped += 1
            logger.warning("a record cannot be written kind=%s reason=%s", self.kind, error)
            return None

    def _ready_file(self, more_bytes: int) -> None:
        if self._descriptor is not None and (self._size + more_bytes > self._file_bytes or not os.fstat(self._descriptor).st_nlink):
            self._end_file()  # full, or deleted by somebody else
        if self._descriptor is None:
            path = self._folder / f"{self.kind}-{self._started}-{self._number:06d}.jsonl"
            self._number += 1  # first: a name that is taken (a clock put back, a container's process 1) must not be tried for ever
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o640)
            self._size = 0
            try:
                self._write(self._head.encode() + b"\n")
            except OSError:  # on a full disk one would come every second, and crowd out those with records
                path.unlink(missing_ok=True)
                raise
            self._delete_oldest(path)

    def _write(self, data: bytes) -> None:
        """Raises: OSError; the file then ends where it did."""
        assert self._descriptor is not None
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            if self._size == 0:  # not even the head: a new file next time
                self._end_file()
            else:
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def _end_file(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _delete_oldest(self, own: Path) -> None:
        """All but the last `files_max`, by name. own: the one just begun, kept even if a clock that was put back makes it the oldest."""
        files = [path for path in sorted(self._folder.glob(f"{self.kind}-*.jsonl")) if path != own]
        for path in files[: max(0, len(files) + 1 - self._files_max)]:
            path.unlink(missing_ok=True)


def started_stamp() -> str:
    """Part of the file names of one run: UTC, and the process, since two may start in one second."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
