"""The ordered log of what happened in a world and its digest: same seed, commit and scenario give the same digest."""

from __future__ import annotations

import hashlib
import struct

from envs.domain.snapshot import FloatArray, IntArray

_NUMBERS = struct.Struct("<dqq")
PENDING_MAX = 4096


class EventLog:
    """Hashes events, some thousand at a time; keeps the readable lines only when asked to (golden tests)."""

    def __init__(self, keep_lines: bool = False) -> None:
        self._hash = hashlib.sha256()
        self._pending: list[bytes] = []
        self.lines: list[str] | None = [] if keep_lines else None
        self.events = 0

    def note(self, now_s: float, kind: str, group_index: int = -1, request_id: int = -1) -> None:
        """One event at `now_s`."""
        self.events += 1
        self._pending += (_NUMBERS.pack(now_s, group_index, request_id), kind.encode())
        if len(self._pending) > PENDING_MAX:
            self._hash_pending()
        if self.lines is not None:
            self.lines.append(f"{now_s:.6f} {kind} group={group_index} request={request_id}")

    def note_records(self, ints: IntArray, floats: FloatArray) -> None:
        """Finished requests, in the order of the rows."""
        self.events += len(ints)
        self._pending += (ints.tobytes(), floats.tobytes())
        if self.lines is not None:
            self.lines.extend(f"{row[3]:.6f} end group={i[1]} request={i[0]} kind={i[2]}" for i, row in zip(ints, floats, strict=True))

    def _hash_pending(self) -> None:
        self._hash.update(b"".join(self._pending))
        self._pending.clear()

    def digest(self) -> str:
        """SHA-256 of everything so far, in order."""
        self._hash_pending()
        return self._hash.hexdigest()
