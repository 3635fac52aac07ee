"""Moves the KV of slots from one plan's ranges to another's, on a rank: ahead of the switch beside the steps, the rest at the switch.

Each slot gets a second, shadow slot under the new plan. Tokens that are there when the move begins are copied in chunks from another
thread; that is safe because a slot only grows. A slot that is given up meanwhile is still sent (as zeros), so that the ranks, which
learn of it at different moments, stay in step; the switch leaves it out. The few tokens that came since cross at the switch in one
gather per chunk on the main thread: the bulk thread stands back for everything else on the machine, and here all ranks wait.

A rank that fails in the copying ahead ends it on all ranks within a chunk (`copy_accord`); the shadows are then dropped.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from runtime.torch_tp.communicators.interface import Communicator
from runtime.torch_tp.copy_accord import CopyAccord
from runtime.torch_tp.kv_store import KvFull, KvStore
from runtime.torch_tp.resplit import KvMove
from runtime.torch_tp.shares import Interval

CHUNK_BYTES = 1 << 20
STILL_WITHIN_S = 60.0  # a copy that failed or is fenced ends within a chunk, at the latest at the communicator's deadline


@dataclass(slots=True)
class _Shadow:
    """tokens: copied ahead, or to be when `copy_ahead` comes; copied: before that."""

    slot: int
    shadow: int
    tokens: int
    copied: int = 0


class KvMover:
    """One round of moves. `begin` and `finish` on the main thread, at the same step of every rank; `copy_ahead` on any other."""

    def __init__(
        self,
        kv: KvStore,
        communicator: Communicator,
        moves: Sequence[KvMove],
        layers: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        lock: threading.Lock,
        generation_of: Callable[[int], int],
    ) -> None:
        """lock: held by whoever changes slots; generation_of: a number that changes when a slot is given up or refilled."""
        self._kv = kv
        self._communicator = communicator
        self._by_layer: list[list[KvMove]] = [[] for _ in range(layers)]
        for move in moves:
            self._by_layer[move.layer].append(move)
        self._head_dim, self._dtype, self._device = head_dim, dtype, device
        self._lock = lock
        self._generation_of = generation_of
        self._shadows: list[_Shadow] = []
        self._generations: dict[int, int] = {}
        self._accord = CopyAccord(communicator, dtype, device)
        self._is_still = threading.Event()  # no copy is under way
        self._is_still.set()
        self.received_bytes = 0

    def begin(
        self, slots: Sequence[int], shadow_of: Callable[[int], int], to_version: int, room_of: Callable[[int], int]
    ) -> tuple[int, ...]:
        """Take shadows for as many of `slots` as there is room for; returns those. room_of: a slot's tokens_max, now and at the end.

        `copy_ahead` must follow; it raises what failed here.
        """
        self._room_of = room_of
        self._is_still.clear()
        with self._accord.noting():
            for slot in slots:
                try:
                    self._kv.allocate(shadow_of(slot), to_version, room_of(slot))
                except KvFull:
                    break  # alike on every rank: room is counted in tokens
                self._shadows.append(_Shadow(slot, shadow_of(slot), self._kv.length(slot)))
                self._generations[slot] = self._generation_of(slot)
        return tuple(shadow.slot for shadow in self._shadows)

    def go_on(self) -> tuple[int, ...]:
        """After `copy_ahead`: have it copy what came since; returns all slots that are being copied."""
        self._is_still.clear()
        with self._accord.noting():
            for shadow in self._shadows:
                shadow.copied = shadow.tokens
                if self._is_same(shadow) and self._has_grown_with(shadow):
                    shadow.tokens = self._kv.length(shadow.slot)
        return tuple(shadow.slot for shadow in self._shadows)

    def copy_ahead(self) -> None:
        """Copy what the slots held at `begin` or `go_on`, then be still. Raises: PeerLost, CollectiveTimeout; what failed on this rank;
        CopyEnded where another one failed."""
        try:
            self._accord.exchange()  # a rank that could not even begin does not know the chunks to come
            for shadow in self._shadows:
                self._copy(shadow, shadow.copied, shadow.tokens)
            self._accord.raise_if_failed()
        finally:
            self._is_still.set()

    def finish(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Bring the shadows of `slots` up to date and put them in the place of their slots; drop the others. Returns: the slots moved,
        which are those that were neither given up nor refilled since `begin`, and for which there is room where they have grown."""
        if not self._is_still.wait(STILL_WITHIN_S):
            raise TimeoutError(f"the copying ahead did not end within {STILL_WITHIN_S:g} s")
        moved: list[int] = []
        for shadow in self._shadows:
            if shadow.slot in slots and self._is_same(shadow) and self._has_grown_with(shadow):
                self._copy(shadow, shadow.tokens, self._kv.length(shadow.slot), at_switch=True)
                with self._lock:
                    self._kv.move(shadow.shadow, shadow.slot)
                moved.append(shadow.slot)
            else:
                self._kv.release(shadow.shadow)
        self._shadows.clear()
        return tuple(moved)

    def _is_same(self, shadow: _Shadow) -> bool:
        """Whether its slot was neither given up nor refilled."""
        return self._generation_of(shadow.slot) == self._generations[shadow.slot]

    def _has_grown_with(self, shadow: _Shadow) -> bool:
        """Give a shadow the room that its slot has by now; False where there is none, alike on every rank."""
        try:
            with self._lock:
                self._kv.grow(shadow.shadow, self._room_of(shadow.slot))
        except KvFull:
            return False
        return True

    def _copy(self, shadow: _Shadow, start: int, end: int, *, at_switch: bool = False) -> None:
        if end <= start:
            return
        noting = nullcontext if at_switch else self._accord.noting
        for layers in self._chunks(end - start):
            moves = [move for layer in layers for move in self._by_layer[layer]]
            arrivals = (self._gathered if at_switch else self._exchanged)(shadow, moves, start, end)
            with noting(), self._lock:
                for move, values in arrivals:
                    self._kv.import_(shadow.shadow, move.layer, move.heads, start, values)
        # a rank that holds no head of the slot must still know its length
        nothing = torch.empty((2, 0, end - start, self._head_dim), dtype=self._dtype, device=self._device)
        with noting(), self._lock:
            self._kv.import_(shadow.shadow, 0, Interval(0, 0), start, nothing)

    def _exchanged(self, shadow: _Shadow, moves: Sequence[KvMove], start: int, end: int) -> list[tuple[KvMove, torch.Tensor]]:
        """What this rank needs, by bulk moves between those concerned."""
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        arrivals: list[tuple[KvMove, torch.Tensor]] = []
        rank = self._communicator.rank
        for move in moves:
            if move.source == rank:
                values = torch.zeros(self._shape(move, start, end), dtype=self._dtype, device=self._device)
                with self._accord.noting():
                    values = self._export(shadow.slot, move, start, end)
                if move.target == rank:
                    arrivals.append((move, values))
                else:
                    sends.append((move.target, values))
            elif move.target == rank:
                room = torch.empty(self._shape(move, start, end), dtype=self._dtype, device=self._device)
                receives.append((move.source, room))
                arrivals.append((move, room))
        self._accord.exchange(sends, receives)
        self.received_bytes += sum(room.nbytes for _, room in receives)
        return arrivals

    def _gathered(self, shadow: _Shadow, moves: Sequence[KvMove], start: int, end: int) -> list[tuple[KvMove, torch.Tensor]]:
        """What this rank needs, out of one gather of all that must cross."""
        rank = self._communicator.rank
        crossing = [move for move in moves if move.source != move.target]
        gathered: list[torch.Tensor] = []
        if crossing:
            own = [self._export(shadow.slot, move, start, end).reshape(-1) for move in crossing if move.source == rank]
            gathered = self._communicator.all_gather(torch.cat(own) if own else torch.empty(0, dtype=self._dtype, device=self._device))
        arrivals = [(move, self._export(shadow.slot, move, start, end)) for move in moves if move.source == move.target == rank]
        taken = [0] * len(gathered)  # of each rank's part
        for move in crossing:
            shape = self._shape(move, start, end)
            begin = taken[move.source]
            taken[move.source] = begin + math.prod(shape)
            if move.target == rank:
                values = gathered[move.source][begin : taken[move.source]].view(shape)
                self.received_bytes += values.nbytes
                arrivals.append((move, values))
        return arrivals

    def _shape(self, move: KvMove, start: int, end: int) -> tuple[int, int, int, int]:
        return 2, move.heads.width, end - start, self._head_dim

    def _export(self, slot: int, move: KvMove, start: int, end: int) -> torch.Tensor:
        with self._lock:
            if self._generation_of(slot) == self._generations[slot]:
                return self._kv.export(slot, move.layer, move.heads, start, end)
        return torch.zeros(self._shape(move, start, end), dtype=self._dtype, device=self._device)

    def _chunks(self, tokens: int) -> Iterator[list[int]]:
        """Layers in runs of about CHUNK_BYTES: the same on every rank, since the runs depend on the moves alone."""
        run: list[int] = []
        size = 0
        for layer, moves in enumerate(self._by_layer):
            size += sum(move.heads.width for move in moves) * tokens * 2 * self._head_dim * self._dtype.itemsize
            run.append(layer)
            if size >= CHUNK_BYTES:
                yield run
                run, size = [], 0
        if run:
            yield run
