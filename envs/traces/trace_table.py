"""A trace in memory: frozen columns, one entry a request, sorted by arrival. Slicing, scaling and mixing make new tables."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from envs.domain.requests import CLASS_INDEX, SERVICE_CLASSES, class_of_label
from envs.traces.trace_row import ReadReport, TraceError, TraceRow

NO_SESSION = -1
NO_PRIORITY = -1
NO_LIMIT = 0


@dataclass(frozen=True, slots=True, eq=False)
class TraceTable:
    """Requests sorted by arrival, ties in file order. All arrays are read-only; n requests.

    arrival_s: float64 (n,). prompt_tokens, output_tokens: int32 (n,). class_index: int8 (n,), into SERVICE_CLASSES.
    session: int32 (n,), index into session_names, -1 for none. priority: int16 (n,), -1 for the class's own.
    output_limit_tokens: int32 (n,), 0 where unknown. prefix_offsets: int64 (n + 1,): request i has the blocks
    prefix_ids[prefix_offsets[i]:prefix_offsets[i + 1]], dense int64 ids from 0, of `block_tokens` tokens each.
    is_labelled: bool (n,), rows whose class is their own label's; the others have the class of their trace. None: no row.
    """

    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    class_index: npt.NDArray[np.int8]
    session: npt.NDArray[np.int32]
    session_names: tuple[str, ...]
    priority: npt.NDArray[np.int16]
    output_limit_tokens: npt.NDArray[np.int32]
    prefix_offsets: npt.NDArray[np.int64]
    prefix_ids: npt.NDArray[np.int64]
    block_tokens: int
    source: str
    synthetic: bool
    report: ReadReport | None = None
    is_labelled: npt.NDArray[np.bool_] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        n = self.arrival_s.shape[0]
        if self.is_labelled is None:
            object.__setattr__(self, "is_labelled", np.zeros(n, np.bool_))
        columns = (
            self.prompt_tokens,
            self.output_tokens,
            self.class_index,
            self.session,
            self.priority,
            self.output_limit_tokens,
            self.is_labelled,
        )
        if any(column.shape != (n,) for column in columns) or self.prefix_offsets.shape != (n + 1,):
            raise ValueError(f"TraceTable {self.source!r}: columns differ in length; arrival_s has {n} entries")
        if n and (not np.isfinite(self.arrival_s).all() or np.any(np.diff(self.arrival_s) < 0)):
            raise ValueError(f"TraceTable {self.source!r}: arrival_s must be finite and sorted; build tables with table_of_rows")
        if n and min(int(self.prompt_tokens.min()), int(self.output_tokens.min())) < 1:
            raise ValueError(f"TraceTable {self.source!r}: every request needs at least one prompt and one output token")
        for column in (*columns, self.arrival_s, self.prefix_offsets, self.prefix_ids):
            column.flags.writeable = False

    def __len__(self) -> int:
        return int(self.arrival_s.shape[0])

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last; 0 for fewer than two requests."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) > 1 else 0.0

    @property
    def rate_per_s(self) -> float:
        """Mean rate over the span; 0 for fewer than two requests or no span."""
        return (len(self) - 1) / self.span_s if self.span_s > 0 else 0.0

    @property
    def prefix_id_count(self) -> int:
        """One more than the largest block id."""
        return int(self.prefix_ids.max()) + 1 if self.prefix_ids.size else 0

    def prefix_blocks(self, index: int) -> npt.NDArray[np.int64]:
        """Block ids of one request, shape (blocks,)."""
        return self.prefix_ids[self.prefix_offsets[index] : self.prefix_offsets[index + 1]]

    def session_name(self, index: int) -> str | None:
        code = int(self.session[index])
        return None if code == NO_SESSION else self.session_names[code]

    def take(self, index: npt.NDArray[np.int64], source: str | None = None) -> TraceTable:
        """The requests `index` (arrivals must stay sorted), block ids and session names unchanged."""
        lengths = np.diff(self.prefix_offsets)[index]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        starts = np.repeat(self.prefix_offsets[:-1][index] - offsets[:-1], lengths)
        ids = self.prefix_ids[starts + np.arange(offsets[-1])]
        columns = (
            "arrival_s", "prompt_tokens", "output_tokens", "class_index", "session", "priority", "output_limit_tokens", "is_labelled",
        )  # fmt: skip
        taken = {name: getattr(self, name)[index] for name in columns}
        return replace(self, **taken, prefix_offsets=offsets, prefix_ids=ids, source=source or self.source)

    def slice(self, start_s: float, end_s: float) -> TraceTable:
        """Requests with start_s <= arrival < end_s, re-based so that `start_s` becomes 0. May be empty.

        Raises TraceError when the window is empty or lies wholly outside the trace.
        """
        if not start_s < end_s:
            raise TraceError(f"slice of {self.source}: start_s={start_s:g} must lie before end_s={end_s:g}")
        if len(self) and (start_s > self.arrival_s[-1] or end_s <= self.arrival_s[0]):
            raise TraceError(
                f"slice of {self.source}: {start_s:g} to {end_s:g} s lies outside the trace, "
                f"{self.arrival_s[0]:g} to {self.arrival_s[-1]:g} s"
            )
        first, last = np.searchsorted(self.arrival_s, (start_s, end_s), side="left")
        part = self.take(np.arange(first, last))
        return replace(part, arrival_s=part.arrival_s - start_s)

    def compress(self, factor: float) -> TraceTable:
        """The same requests with all times divided by `factor` (2 = twice the rate, half the span, think times too)."""
        if not (factor > 0 and np.isfinite(factor)):
            raise TraceError(f"compress of {self.source}: factor={factor} must be positive and finite")
        return replace(self, arrival_s=self.arrival_s / factor)

    def thin(self, fraction: float, rng: np.random.Generator) -> TraceTable:
        """Keep each session (each request, where there is none) with this probability; the clock stays."""
        if not 0 < fraction <= 1:
            raise TraceError(f"thin of {self.source}: fraction={fraction} must lie in (0, 1]")
        keep = rng.random(len(self)) < fraction
        by_session = rng.random(max(1, len(self.session_names))) < fraction
        keep = np.where(self.session == NO_SESSION, keep, by_session[self.session])
        return self.take(np.flatnonzero(keep))

    def repeat_to(self, rows: int) -> TraceTable:
        """At least as many copies end to end as make `rows` requests, cut there; the source says how often.

        A copy begins one mean gap after the last arrival. Sessions and prefix blocks are the same in every copy.
        """
        if not len(self):
            raise TraceError(f"repeat of {self.source}: the trace is empty")
        copies = -(-rows // len(self))
        period_s = self.span_s + (1.0 / self.rate_per_s if self.rate_per_s else 1.0)
        index = np.arange(rows) % len(self)
        arrival_s = self.arrival_s[index] + period_s * (np.arange(rows) // len(self))
        still = replace(self, arrival_s=np.zeros(len(self)))  # `take` wants sorted arrivals; the true ones follow
        source = f"{self.source} (repeated {copies} times)" if copies > 1 else self.source
        return replace(still.take(index, source), arrival_s=arrival_s)

    def rows(self) -> Iterator[TraceRow]:
        """The requests as rows."""
        for i in range(len(self)):
            blocks = tuple(self.prefix_blocks(i).tolist())
            yield TraceRow(
                float(self.arrival_s[i]),
                int(self.prompt_tokens[i]),
                int(self.output_tokens[i]),
                SERVICE_CLASSES[self.class_index[i]].name,
                None if self.priority[i] == NO_PRIORITY else int(self.priority[i]),
                self.session_name(i),
                blocks,
                self.block_tokens if blocks else 0,
                int(self.output_limit_tokens[i]) or None,
            )


def mix(tables: Sequence[TraceTable], source: str | None = None) -> TraceTable:
    """Lay traces over one another on one clock. Sessions and blocks of different tables never meet; ties: first table first.

    Raises TraceError for no tables, or for prefix blocks of different sizes.
    """
    if not tables:
        raise TraceError("mix: no tables; give at least one")
    sizes = {table.block_tokens for table in tables if table.prefix_ids.size}
    if len(sizes) > 1:
        raise TraceError(f"mix: prefix blocks of {sorted(sizes)} tokens do not mix; drop the prefixes of all but one kind")
    arrival_s = np.concatenate([table.arrival_s for table in tables])
    order = np.argsort(arrival_s, kind="stable")
    session_base = np.cumsum([0] + [len(table.session_names) for table in tables])
    block_base = np.cumsum([0] + [table.prefix_id_count for table in tables])
    session = np.concatenate(
        [np.where(t.session == NO_SESSION, NO_SESSION, t.session + base) for t, base in zip(tables, session_base, strict=False)]
    )
    lengths = np.concatenate([np.diff(table.prefix_offsets) for table in tables])
    joined = TraceTable(
        arrival_s=np.zeros(arrival_s.size),  # a sorted stand-in until `take` has ordered the rows
        prompt_tokens=np.concatenate([table.prompt_tokens for table in tables]),
        output_tokens=np.concatenate([table.output_tokens for table in tables]),
        class_index=np.concatenate([table.class_index for table in tables]),
        session=session.astype(np.int32),
        session_names=tuple(f"{k}/{name}" for k, table in enumerate(tables) for name in table.session_names),
        priority=np.concatenate([table.priority for table in tables]),
        output_limit_tokens=np.concatenate([table.output_limit_tokens for table in tables]),
        prefix_offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        prefix_ids=np.concatenate([t.prefix_ids + base for t, base in zip(tables, block_base, strict=False)]).astype(np.int64),
        block_tokens=sizes.pop() if sizes else 0,
        source=source or " + ".join(table.source for table in tables),
        synthetic=any(table.synthetic for table in tables),
        is_labelled=np.concatenate([table.is_labelled for table in tables]),
    )
    return replace(joined.take(order), arrival_s=arrival_s[order])


class _Columns:
    """Growing columns; `add` takes rows by the thousand, since a column at a time is three times as fast as a row."""

    def __init__(self) -> None:
        self.arrival, self.offsets, self.ids = array("d"), array("q", [0]), array("q")
        self.prompt, self.output, self.limit, self.session = array("i"), array("i"), array("i"), array("i")
        self.classes, self.priority, self.labelled = array("b"), array("h"), array("b")
        self.names: dict[str, int] = {}
        self.blocks: dict[int, int] = {}
        self.block_sizes: set[int] = set()
        self.unknown_classes: Counter[str] = Counter()

    def add(self, rows: list[TraceRow], default_class: int) -> None:
        """Append rows; those without a known class count as `default_class`."""
        self.arrival.extend([row.arrival_s for row in rows])
        self.prompt.extend([row.prompt_tokens for row in rows])
        self.output.extend([row.output_tokens for row in rows])
        self.limit.extend([row.output_limit_tokens or NO_LIMIT for row in rows])
        self.priority.extend([NO_PRIORITY if row.priority is None else max(-1, min(row.priority, 32767)) for row in rows])
        labels = [row.service_class for row in rows]
        known = {label: None if label is None else class_of_label(label) for label in set(labels)}
        of_label = {label: default_class if index is None else index for label, index in known.items()}
        self.classes.extend([of_label[label] for label in labels])
        self.labelled.extend([known[label] is not None for label in labels])
        if unknown := {label for label, index in known.items() if label is not None and index is None}:
            self.unknown_classes.update(label for label in labels if label in unknown)
        names, blocks, offsets = self.names, self.blocks, self.offsets
        self.session.extend([NO_SESSION if row.session is None else names.setdefault(row.session, len(names)) for row in rows])
        for row in rows:
            if row.prefix_blocks:
                self.block_sizes.add(row.block_tokens)
                self.ids.extend([blocks.setdefault(block, len(blocks)) for block in row.prefix_blocks])
            offsets.append(len(self.ids))


_ROWS_AT_ONCE = 4096


def table_of_rows(rows: Iterable[TraceRow], source: str, report: ReadReport | None = None, synthetic: bool = False) -> TraceTable:
    """Collect rows into a table: sorted stably, shifted so that no arrival is below 0; memory is the columns' own.

    Class: the row's label where it means one of SERVICE_CLASSES, else the report's default (unknown labels are counted in its
    notes).
    """
    columns = _Columns()
    stream = iter(rows)
    while chunk := list(islice(stream, _ROWS_AT_ONCE)):
        # The report knows its default class once the reader has looked at the file, that is, from the first row on.
        columns.add(chunk, CLASS_INDEX.get(report.default_class, 0) if report else 0)
    if len(columns.block_sizes) > 1:
        sizes = sorted(columns.block_sizes)
        raise TraceError(f"{source}: prefix blocks of several sizes ({sizes} tokens) in one trace; convert them apart")
    if report is not None:
        synthetic = synthetic or report.synthetic
        for label, count in columns.unknown_classes.items():
            known = ", ".join(CLASS_INDEX)
            report.note(f"class {label!r} of {count} rows is none of {known}; they count as {report.default_class}")
    return _sorted_table(columns, source, report, synthetic)


def _sorted_table(columns: _Columns, source: str, report: ReadReport | None, synthetic: bool) -> TraceTable:
    arrival_s = _as_array(columns.arrival, np.float64)
    order = np.argsort(arrival_s, kind="stable")
    is_sorted = bool(np.all(np.diff(arrival_s) >= 0))
    shift_s = min(0.0, float(arrival_s[order[0]])) if order.size else 0.0
    table = TraceTable(
        arrival_s=arrival_s - shift_s if is_sorted else np.zeros(arrival_s.size),
        prompt_tokens=_as_array(columns.prompt, np.int32),
        output_tokens=_as_array(columns.output, np.int32),
        class_index=_as_array(columns.classes, np.int8),
        session=_as_array(columns.session, np.int32),
        session_names=tuple(columns.names),
        priority=_as_array(columns.priority, np.int16),
        output_limit_tokens=_as_array(columns.limit, np.int32),
        is_labelled=_as_array(columns.labelled, np.bool_),
        prefix_offsets=_as_array(columns.offsets, np.int64),
        prefix_ids=_as_array(columns.ids, np.int64),
        block_tokens=max(columns.block_sizes, default=0),
        source=source,
        synthetic=synthetic,
        report=report,
    )
    return table if is_sorted else replace(table.take(order), arrival_s=arrival_s[order] - shift_s)


def _as_array(column: array[Any], kind: type[np.generic]) -> npt.NDArray[Any]:
    """The column's own memory as a numpy array."""
    return np.frombuffer(column, dtype=kind) if len(column) else np.empty(0, kind)
