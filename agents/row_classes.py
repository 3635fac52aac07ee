"""Which class each row of a trace has in an experiment: its trace's, its own label's, or the classifier's.

The classifier sees a row as a router would when it arrives: prompt length, the part of its prefix that earlier rows have
had, its turn in the session, and how bursty its client has been so far. Never its answer, never a later row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from envs.decision.request_classes import GapStatistics, classify
from envs.domain.requests import CLASS_INDEX, SERVICE_CLASSES
from envs.domain.suggestions import unknown_name
from envs.traces.trace_row import TraceError
from envs.traces.trace_table import NO_SESSION, TraceTable

ClassSource = Literal["trace", "label", "classifier"]
SOURCES: tuple[str, ...] = get_args(ClassSource)


def with_classes(table: TraceTable, source: str = "trace", mapping: Mapping[str, str] | None = None) -> TraceTable:
    """`table` with the class of every row from `source`.

    trace: a row's label where it has one, else the class of its trace (DESIGN section 8). label: every row must have one.
    classifier: a row's label where it has one, else `classify` on its features at arrival. mapping: then from class name to
    class name, for an experiment that maps classes otherwise.
    Raises: TraceError when `label` is asked for and rows have none; ValueError for an unknown source or class.
    """
    if source not in SOURCES:
        raise ValueError(unknown_name("class source", source, SOURCES))
    if source == "label" and not table.is_labelled.all():
        missing = int((~table.is_labelled).sum())
        raise TraceError(
            f"{table.source}: {missing} of {len(table)} rows have no label of {', '.join(CLASS_INDEX)}; "
            "take classes from the trace or the classifier, or label every row"
        )
    classes = table.class_index.astype(np.int64)
    if source == "classifier":
        classes = np.where(table.is_labelled, classes, classified(table))
    if mapping:
        to = np.arange(len(SERVICE_CLASSES))
        for name, target in mapping.items():
            for known in (name, target):
                if known not in CLASS_INDEX:
                    raise ValueError(unknown_name("service class", known, CLASS_INDEX))
            to[CLASS_INDEX[name]] = CLASS_INDEX[target]
        classes = to[classes]
    return replace(table, class_index=classes.astype(np.int8))


def classified(table: TraceTable) -> np.ndarray:
    """Class index of every row by its features at arrival, shape (n,); labels are not looked at.

    A trace names no clients, so all of its rows count as one client's: burstiness is that of the arrivals so far.
    """
    turns: Counter[int] = Counter()
    gaps = GapStatistics()
    seen = np.zeros(table.prefix_id_count + 1, np.bool_)
    found = np.empty(len(table), np.int64)
    rows = zip(table.arrival_s.tolist(), table.prompt_tokens.tolist(), table.session.tolist(), strict=True)
    for i, (arrival_s, prompt, session) in enumerate(rows):
        gaps.arrive(arrival_s)
        blocks = table.prefix_blocks(i)
        share = None
        if table.block_tokens:
            new = np.flatnonzero(~seen[blocks])
            known = int(new[0]) if new.size else len(blocks)  # a prefix is shared up to its first new block
            share = min(1.0, known * table.block_tokens / prompt)
            seen[blocks] = True
        turn = None
        if session != NO_SESSION:
            turn = turns[session]
            turns[session] += 1
        found[i] = classify(None, prompt, share, turn, gaps.burstiness)
    return found


def class_shares(table: TraceTable) -> dict[str, float]:
    """Share of the rows in each class that occurs."""
    counts = np.bincount(table.class_index, minlength=len(SERVICE_CLASSES))
    return {service.name: float(n) / len(table) for service, n in zip(SERVICE_CLASSES, counts, strict=True) if n}
