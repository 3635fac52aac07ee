"""Requests that go on in another engine of the same host with their KV copied: given here, taken there. The engines' side; no torch.

Giving: the ranks write what a running request's slot holds to a file in shared memory, while it runs on. Taking: what the file holds goes
to a slot of nobody's, and once it is there it is a prefix like any other, which the request finds when it comes. So whatever fails on
the way, a request is computed from its token ids as far as its KV did not come, and nothing is lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

from runtime.torch_tp.batcher import Batcher
from runtime.torch_tp.communicators.segment_names import segment_name, sweep_stale_segments
from runtime.torch_tp.group_values import GroupError
from runtime.torch_tp.kv_file import KvFile
from runtime.torch_tp.orders import Carried, CarryOrder
from runtime.torch_tp.supervisor import Supervisor

GROWTH_TOKENS = 512
"""A file has room for so many tokens more than its request had when it was made."""
WAITING_MAX = 16
_FILE_NUMBERS = count(1)  # of this process, since the names are


@dataclass(frozen=True, slots=True)
class GivenKv:
    """file: holds the KV of `ids`, of which those from `start` on came with this part. kv_bytes, seconds: what the part took."""

    file: KvFile
    ids: tuple[int, ...]
    start: int
    kv_bytes: int
    seconds: float


@dataclass(slots=True)
class _Part:
    """What is wanted, and how far it is. gives: a request's id, else None. given: what is taken, or known so far of what is given. slot,
    copy: once there are such. until_s: when nobody waits any more."""

    until_s: float
    told: Future[GivenKv]
    given: GivenKv
    gives: str | None = None
    slot: int | None = None
    copy: Future[Carried] | None = None


class KvHandovers:
    """`give` and `take` from any thread but the engine's, the rest from the engine's; one part is carried at a time. lock: over the
    batcher; whoever calls `tend`, between two steps, does not hold it, whoever calls `ended` does."""

    def __init__(self, kind: tuple[int, int, int, str], batcher: Batcher, lock: threading.Condition) -> None:
        """kind: see KvFile."""
        self._kind, self._batcher, self._lock = kind, batcher, lock
        self._waiting: deque[_Part] = deque()
        self._current: _Part | None = None
        self._files: dict[str, KvFile] = {}
        self._is_closed = False

    @property
    def is_under_way(self) -> bool:
        """Slots must stay where they are."""
        return self._current is not None

    @property
    def has_work(self) -> bool:
        return self._current is not None or bool(self._waiting)

    # --- any thread ---------------------------------------------------------------------------------------------------------

    def give(self, request_id: str, after: int, deadline_s: float) -> GivenKv:
        """Have the KV of a running request written to its file, from token `after` on: that of those before was given already.

        Raises: GroupError where it cannot be done, TimeoutError.
        """
        file = self._file_of(request_id)
        return self._ask(_Part(time.monotonic() + deadline_s, Future(), GivenKv(file, (), after, 0, 0.0), request_id), deadline_s)

    def take(self, given: GivenKv, deadline_s: float) -> GivenKv:
        """Have what was given ready for the request that comes. Returns the same, with what that took. Raises: as `give`."""
        if given.file.kind != self._kind:
            raise GroupError(f"KV of another model: (layers, KV heads, head size, dtype) {given.file.kind}, here {self._kind}")
        return self._ask(_Part(time.monotonic() + deadline_s, Future(), given), deadline_s)

    def _file_of(self, request_id: str) -> KvFile:
        with self._lock:
            held = self._batcher.held(request_id)
            if held is None:
                raise GroupError("the request does not run here")
            if (file := self._files.get(request_id)) is not None:
                return file
        layers, heads, head_dim, dtype = self._kind
        _, ids, most = held
        name = segment_name(os.getpid(), next(_FILE_NUMBERS), "kv")
        file = KvFile(name, layers, heads, min(most, len(ids) + GROWTH_TOKENS), head_dim, dtype)
        try:
            file.create()  # takes its time where it is large: the lock is free meanwhile
        except OSError as error:
            raise GroupError(str(error)) from error
        with self._lock:
            if self._is_closed or self._batcher.held(request_id) is None or request_id in self._files:
                file.remove()
                raise GroupError("the request does not run here any more")
            self._files[request_id] = file
        return file

    def _ask(self, part: _Part, deadline_s: float) -> GivenKv:
        with self._lock:
            if self._is_closed or len(self._waiting) >= WAITING_MAX:
                raise GroupError("the engine is closed" if self._is_closed else f"{WAITING_MAX} copies of KV wait already")
            self._waiting.append(part)
            self._lock.notify()
        return part.told.result(deadline_s)

    # --- the engine's thread ------------------------------------------------------------------------------------------------

    def tend(self, supervisor: Supervisor) -> None:
        """Go on with the part under way, or begin one."""
        if self._current is None:
            if not self._waiting:
                return
            self._current = self._waiting.popleft()
        part = self._current
        try:
            if part.copy is None:
                self._begin(part, supervisor)
            elif part.copy.done():
                self._end(part, part.copy.result())
        except (GroupError, OSError) as error:
            self._give_up(part, error)

    def _begin(self, part: _Part, supervisor: Supervisor) -> None:
        if time.monotonic() > part.until_s:
            raise GroupError("the group was busy with something else")
        given = part.given
        with self._lock:
            if part.gives is not None:
                part.slot, part.given = self._source(part.gives, given)
            elif part.slot is None:
                part.slot = self._batcher.expect(given.ids[: given.start], given.file.tokens)
                if part.slot is None:
                    raise GroupError("no room for the KV of one more request")
            if not self._batcher.is_at_ranks(part.slot):
                return  # with the next step
            if part.gives is None and not self._batcher.is_expected(part.slot):
                raise GroupError("the slot was lost")
        given = part.given
        deadline_s = max(part.until_s - time.monotonic(), 0.1)
        order = CarryOrder(given.file, part.slot, given.start, len(given.ids), part.gives is not None, deadline_s)
        part.copy = supervisor.carry(order)

    def _source(self, request_id: str, given: GivenKv) -> tuple[int, GivenKv]:
        held = self._batcher.held(request_id)
        if held is None:
            raise GroupError("the request does not run here any more")
        slot, ids, _ = held
        ids = ids[: given.file.tokens]
        if len(ids) <= given.start:
            raise GroupError(f"{len(ids)} tokens have KV, {given.start} of them were given already")
        return slot, GivenKv(given.file, ids, given.start, 0, 0.0)

    def _end(self, part: _Part, carried: Carried) -> None:
        if carried.error:
            raise GroupError(carried.error)
        given = part.given
        if part.gives is None:
            assert part.slot is not None
            with self._lock:
                if not self._batcher.arrived(part.slot, given.ids):
                    raise GroupError("the slot was lost")
        self._current = None
        _tell(part.told, GivenKv(given.file, given.ids, given.start, carried.kv_bytes, carried.seconds))

    def _give_up(self, part: _Part, error: Exception) -> None:
        self._current = None
        if part.gives is None:
            if part.slot is not None:
                with self._lock:
                    self._batcher.arrived(part.slot, ())
            sweep_stale_segments()  # perhaps it failed because its giver is dead
        _tell(part.told, error if isinstance(error, GroupError) else GroupError(str(error)))

    def ended(self, request_id: str) -> None:
        """A request has left: nobody reads its file any more."""
        if (file := self._files.pop(request_id, None)) is not None:
            file.remove()

    def close(self, error: GroupError) -> None:
        """Nothing will be carried any more; no file is left."""
        with self._lock:
            self._is_closed = True
            parts = [*([] if self._current is None else [self._current]), *self._waiting]
            self._current = None
            self._waiting.clear()
            for request_id in list(self._files):
                self.ended(request_id)
        for part in parts:
            _tell(part.told, error)


def _tell(told: Future[GivenKv], what: GivenKv | GroupError) -> None:
    """Whoever asked may have stopped waiting; that is no concern of ours."""
    if isinstance(what, GroupError):
        told.set_exception(what)
    else:
        told.set_result(what)
