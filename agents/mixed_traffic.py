"""Traffic of several classes on one clock: named traces or files laid over one another, and batch requests at a given rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field, PositiveFloat, model_validator

from agents.row_classes import with_classes
from envs.decision.length_estimator import OUTPUT_MIXTURES
from envs.decision.request_classes import CLASS_FEATURES, label_class
from envs.traces import ArrivalProcess, TraceRow, load_trace, mix, table_of_rows
from envs.traces.default_traces import FILES, default_trace, search_folders
from envs.traces.trace_table import TraceTable

BATCH = "batch"
BATCH_FILES = (
    "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
    "lengths/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
)
"""Measured lengths of summarization requests (microsoft/vidur); no public trace of batch requests has arrival times."""
PROMPT_TOKENS_MAX = 16_384


class TracePart(BaseModel, extra="forbid"):
    """One part of mixed traffic. name: a named trace, a trace file, or `batch` (summarization requests, Poisson arrivals).

    rate: its clock runs so many times as fast. label: the class of all its rows, which then counts as their label; without one
    the rows keep what they have. requests_per_s, span_s: of `batch` alone.
    """

    name: str
    format: str | None = None
    rate: PositiveFloat = 1.0
    label: str | None = None
    requests_per_s: PositiveFloat = 0.5
    span_s: PositiveFloat = Field(3600.0)

    @model_validator(mode="after")
    def _label_is_known(self) -> TracePart:
        if self.label is not None:
            label_class(self.label)
        return self


def mixed_traffic(parts: Sequence[TracePart], class_source: str, seed: int) -> TraceTable:
    """The parts on one clock, each with its classes by `class_source` (see `with_classes`): a part counts as one client, so the
    classifier meets each by itself. seed: of what is drawn."""
    tables = []
    for part, stream in zip(parts, np.random.SeedSequence(seed).spawn(len(parts)), strict=True):
        table = _table_of(part, np.random.default_rng(stream)).compress(part.rate)
        if part.label is not None:
            index = np.full(len(table), label_class(part.label), np.int8)
            table = replace(table, class_index=index, is_labelled=np.ones(len(table), np.bool_))
        tables.append(with_classes(table, class_source))
    sizes = {table.block_tokens for table in tables if table.prefix_ids.size}
    if len(sizes) > 1:
        raise ValueError(f"trace.parts: prefix blocks of {sorted(sizes)} tokens do not mix; leave out all but one of such parts")
    return mix(tables, " + ".join(Path(table.source).name for table in tables))


def _table_of(part: TracePart, rng: np.random.Generator) -> TraceTable:
    if part.name == BATCH:
        return batch_requests(part.span_s, part.requests_per_s, rng)
    if part.name not in FILES and Path(part.name).is_file():
        return load_trace(part.name, part.format)
    return default_trace(part.name)


def batch_requests(span_s: float, requests_per_s: float, rng: np.random.Generator) -> TraceTable:
    """Summarization requests, Poisson over `span_s`: lengths drawn from the measured ones where that file is found, else from
    the mixtures fitted to them. Made up either way, and the table says so."""
    arrivals = []
    for arrival_s in ArrivalProcess(requests_per_s).arrivals_s(rng):
        if arrival_s >= span_s:
            break
        arrivals.append(arrival_s)
    found = [folder / name for folder in search_folders() for name in BATCH_FILES if (folder / name).is_file()]
    if found:
        measured = load_trace(found[0], "vidur-lengths", arrival=ArrivalProcess(1.0))
        chosen = rng.integers(0, len(measured), len(arrivals))
        prompts, answers = measured.prompt_tokens[chosen], measured.output_tokens[chosen]
        source = "batch requests with arXiv summarization lengths"
    else:
        prompts, answers = (_draw(mixture, len(arrivals), rng) for mixture in (CLASS_FEATURES[BATCH].prompt, OUTPUT_MIXTURES[BATCH]))
        source = "batch requests with fitted lengths"
    rows = [
        TraceRow(arrival_s, int(prompt), int(answer), BATCH) for arrival_s, prompt, answer in zip(arrivals, prompts, answers, strict=True)
    ]
    return table_of_rows(rows, source, synthetic=True)


def _draw(mixture: Sequence[tuple[float, float, float]], size: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens from a mixture of lognormals (weight, mu, sigma), shape (size,), within 1 to PROMPT_TOKENS_MAX."""
    weight, mu, sigma = (np.array(column) for column in zip(*mixture, strict=True))
    kind = rng.choice(len(weight), size=size, p=weight / weight.sum())
    return np.clip(np.rint(np.exp(mu[kind] + sigma[kind] * rng.standard_normal(size))), 1, PROMPT_TOKENS_MAX).astype(np.int64)
