"""What every format offers: a name, how it is recognised, what it needs, and a streaming read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from envs.traces.read_options import ReadOptions
from envs.traces.trace_file import TraceFile, TraceHead
from envs.traces.trace_row import ReadReport, TraceRow

Read = Callable[[TraceFile, ReadOptions, ReadReport], Iterator[TraceRow]]


@dataclass(frozen=True, slots=True)
class Reader:
    """One format. `recognise` sees the head of a file; `wanted` are the names it cannot do without.

    needs_arrival: the file has no arrival times, a made-up process is needed. places_sessions: `read` itself uses the
    process, to place sessions. unit: of the file's times.
    """

    name: str
    unit: str
    wanted: tuple[str, ...]
    read: Read
    recognise: Callable[[TraceHead], bool]
    default_class: str = "chat"
    needs_arrival: bool = False
    places_sessions: bool = False


def has_keys(*names: str) -> Callable[[TraceHead], bool]:
    """Recogniser: all names are present, as JSON keys or CSV columns."""
    wanted = frozenset(names)
    return lambda head: wanted <= head.keys


def has_columns(*names: str) -> Callable[[TraceHead], bool]:
    """Recogniser: all names are present as CSV columns."""
    wanted = frozenset(names)
    return lambda head: wanted <= frozenset(head.columns)
