"""Who is alive, outside the collectives: a page that workers tick and the controller reads, and the rule that suspects one.

The page is an anonymous file handed to the workers when they start, so nothing of it can be left behind. A worker on another
host sends the same words by its socket. What follows from a suspicion is the supervisor's business.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from envs.decision.detection import DETECTION, FailureKind, detection_delay_s

_SLOT_WORDS = 8  # one cache line, so that ranks do not slow each other's ticks
_PROGRESS, _BEAT, _PHASE = range(3)
BEAT_EVERY_S = 0.05
REMOTE_SLACK_S = 0.75
"""Beats over a network may be late by a retransmission: added to the limit of a rank on another host."""

WATCH_SLACK_S = 0.25
"""Kept off the promised 3 s, for the watch's own rounds."""


class Phase(IntEnum):
    STARTING = 0  # imports, reads the checkpoint: may hold the interpreter, so beats may be late
    IDLE = 1
    COMPUTING = 2
    WAITING = 3  # in a collective: somebody else may be the cause


@dataclass(frozen=True, slots=True)
class Reading:
    """What a rank last showed. progress: ticks of its main thread; beat: ticks of its second thread."""

    progress: int = 0
    beat: int = 0
    phase: Phase = Phase.STARTING


class ProgressPage:
    """Shared words: the lowest epoch that is not fenced, then one slot per worker. Writers own their words, so no lock."""

    def __init__(self, file_descriptor: int, slots: int) -> None:
        self.file_descriptor = file_descriptor
        self.slots = slots
        self._map = mmap.mmap(file_descriptor, self.size_bytes(slots))
        self._words = memoryview(self._map).cast("Q")

    @staticmethod
    def size_bytes(slots: int) -> int:
        return 8 * _SLOT_WORDS * (slots + 1)

    @classmethod
    def create(cls, slots: int) -> ProgressPage:
        file_descriptor = os.memfd_create("ballast-progress")
        os.ftruncate(file_descriptor, cls.size_bytes(slots))
        return cls(file_descriptor, slots)

    @property
    def epoch_min(self) -> int:
        """Collectives of an epoch below this are to be abandoned."""
        return self._words[0]

    @epoch_min.setter
    def epoch_min(self, epoch: int) -> None:
        self._words[0] = epoch

    def slot(self, index: int) -> Slot:
        if not 0 <= index < self.slots:
            raise ValueError(f"progress page has slots 0 to {self.slots - 1}, not {index}")
        start = _SLOT_WORDS * (index + 1)
        return Slot(self._words[start : start + _SLOT_WORDS])

    def close(self) -> None:
        self._words.release()
        with contextlib.suppress(BufferError):  # a slot is still held somewhere; the memory goes with the process
            self._map.close()
        os.close(self.file_descriptor)


class Slot:
    """One worker's words."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview | None = None) -> None:
        """Without words: a private slot, for a worker on another host, which sends its readings."""
        self._words = memoryview(bytearray(8 * _SLOT_WORDS)).cast("Q") if words is None else words

    def tick(self) -> None:
        self._words[_PROGRESS] += 1

    def beat(self) -> None:
        self._words[_BEAT] += 1

    def enter(self, phase: Phase) -> None:
        self._words[_PHASE] = phase

    def write(self, reading: Reading) -> None:
        self._words[_PROGRESS], self._words[_BEAT], self._words[_PHASE] = reading.progress, reading.beat, reading.phase

    def read(self) -> Reading:
        return Reading(self._words[_PROGRESS], self._words[_BEAT], Phase(self._words[_PHASE]))

    def clear(self) -> None:
        for index in range(_SLOT_WORDS):
            self._words[index] = 0


@dataclass(slots=True)
class Watch:
    """When one worker's words last changed."""

    reading: Reading
    progressed_s: float
    beaten_s: float

    @classmethod
    def start(cls, now_s: float) -> Watch:
        return cls(Reading(), now_s, now_s)

    def observe(self, reading: Reading, now_s: float) -> None:
        if reading.progress != self.reading.progress or reading.phase != self.reading.phase:
            self.progressed_s = now_s
        if reading.beat != self.reading.beat:
            self.beaten_s = now_s
        self.reading = reading

    def step_begins(self, now_s: float) -> None:
        """A rank that was idle owes its first tick from now on."""
        self.progressed_s = max(self.progressed_s, now_s)


def process_state(pid: int) -> str:
    """The kernel's letter for a process on this host: R, S, D run or wait; T, t are stopped; Z, X are dead, as is "" (gone)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def is_suspect(watch: Watch, now_s: float, predicted_step_s: float, is_stepping: bool, state: str | None) -> bool:
    """Whether a worker counts as frozen.

    Args: watch, now_s: its last signs of life; predicted_step_s: of the step under way, 0 when idle; is_stepping: it owes a
    step; state: `process_state` of a worker on this host, None for one elsewhere.

    A worker whose second thread is silent, or whose main thread owes a step and stands still outside a collective, for
    max(250 ms, 5 x predicted step) is suspect. Where the kernel can be asked, its word counts: a stopped process is suspect at
    once after 250 ms, and one that is running is given until the promise of 3 s, since a starved or importing process is
    silent as well, and killing it would not make the machine any less busy.
    """
    limit_s = float(detection_delay_s(FailureKind.RANK_FROZEN, predicted_step_s))
    is_starting = watch.reading.phase is Phase.STARTING
    owes = is_stepping and watch.reading.phase is not Phase.WAITING and not is_starting
    silent_s = max(now_s - watch.beaten_s, now_s - watch.progressed_s if owes else 0.0)
    if state is None:
        return silent_s > limit_s + REMOTE_SLACK_S and not is_starting
    if state in ("T", "t"):
        return now_s - watch.beaten_s > DETECTION[FailureKind.RANK_FROZEN].noticed_s
    if is_starting:
        return False  # the deadline of its start bounds it
    return silent_s > max(limit_s, DETECTION[FailureKind.RANK_FROZEN].noticed_limit_s - WATCH_SLACK_S)


def laggards(readings: Mapping[int, Reading]) -> list[int]:
    """Of ranks that all wait in a collective: those that are behind the others, [] when nobody is."""
    if not readings:
        return []
    most = max(reading.progress for reading in readings.values())
    return [rank for rank, reading in readings.items() if reading.progress < most]
