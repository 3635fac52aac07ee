"""What `inspect` says about a table: span, rates, burstiness, lengths, prefix sharing with an endless cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.domain.requests import SERVICE_CLASSES
from envs.traces.trace_table import NO_SESSION, TraceTable

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """None where there is too little data. CV: of gaps; dispersion: variance / mean of whole minutes' counts."""

    rows: int
    span_s: float
    rate_per_s: float
    gap_cv: float | None
    minute_dispersion: float | None
    minute_peak_to_mean: float | None
    minute_lag1: float | None
    tied_fraction: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """Prefix blocks with an endless cache: a block is reused when the prompt's blocks from the first on were all seen."""

    blocks: int
    blocks_per_request: float
    reused_fraction: float
    requests_reusing_fraction: float
    gap_s_p10_p50_p90: tuple[float, float, float] | None


def counts_per(table: TraceTable, window_s: float) -> npt.NDArray[np.int64]:
    """Requests in each whole window from the first arrival on, shape (windows,)."""
    windows = int(table.span_s // window_s)
    if windows < 1:
        return np.empty(0, np.int64)
    index = ((table.arrival_s - table.arrival_s[0]) // window_s).astype(np.int64)
    return np.bincount(index[index < windows], minlength=windows)


def arrivals_of(table: TraceTable) -> Arrivals:
    """Arrival statistics of a table."""
    gaps_s = np.diff(table.arrival_s)
    has_gaps = gaps_s.size > 1 and gaps_s.mean() > 0
    counts = counts_per(table, 60.0)
    busy = counts.size > 1 and counts.mean() > 0
    correlated = counts.size > 2 and counts[:-1].std() > 0 and counts[1:].std() > 0
    return Arrivals(
        len(table),
        table.span_s,
        table.rate_per_s,
        float(gaps_s.std() / gaps_s.mean()) if has_gaps else None,
        float(counts.var() / counts.mean()) if busy else None,
        float(counts.max() / counts.mean()) if busy else None,
        float(np.corrcoef(counts[:-1], counts[1:])[0, 1]) if correlated else None,
        float((gaps_s == 0).mean()) if gaps_s.size else 0.0,
    )


def lengths_of(tokens: npt.NDArray[np.int32]) -> Lengths | None:
    """Length statistics of one column; None for an empty one."""
    if not tokens.size:
        return None
    p50, p90, p99 = (float(value) for value in np.quantile(tokens, QUANTILES))
    return Lengths(float(tokens.mean()), p50, p90, p99, int(tokens.max()))


def sharing_of(table: TraceTable) -> Sharing | None:
    """Prefix sharing; None when no request has blocks. The first block counts as reuse but not as "requests reusing":
    where all requests begin alike, sharing it says nothing about a session."""
    if not table.prefix_ids.size:
        return None
    last_s: dict[int, float] = {}
    reused = reusing = 0
    gaps_s: list[float] = []
    ids, offsets = table.prefix_ids.tolist(), table.prefix_offsets.tolist()
    for i, now_s in enumerate(table.arrival_s.tolist()):
        blocks = ids[offsets[i] : offsets[i + 1]]
        hit = 0
        while hit < len(blocks) and blocks[hit] in last_s:
            hit += 1
        gaps_s += [now_s - last_s[block] for block in blocks[1:hit]]
        reused += hit
        reusing += hit > 1
        for block in blocks:
            last_s[block] = now_s
    quantiles = tuple(float(value) for value in np.quantile(gaps_s, (0.1, 0.5, 0.9))) if gaps_s else None
    return Sharing(len(ids), len(ids) / len(table), reused / len(ids), reusing / len(table), quantiles)  # type: ignore[arg-type]


def _number(value: float | None, text: str) -> str:
    return "-" if value is None else format(value, text)


def describe(table: TraceTable) -> list[str]:
    """The statistics as lines of text."""
    a = arrivals_of(table)
    lines = [f"source: {table.source}" + (" (synthetic)" if table.synthetic else "")]
    first_s = float(table.arrival_s[0]) if len(table) else 0.0
    lines.append(f"requests: {a.rows}, first at {first_s:.3f} s, span {a.span_s:.3f} s, rate {a.rate_per_s:.3f} req/s")
    lines.append(
        f"burstiness: CV of gaps {_number(a.gap_cv, '.2f')}; counts a minute: "
        f"variance/mean {_number(a.minute_dispersion, '.1f')}, peak/mean {_number(a.minute_peak_to_mean, '.2f')}, "
        f"lag-1 {_number(a.minute_lag1, '.2f')}; same stamp as before {a.tied_fraction:.1%}"
    )
    for name, column in (("prompt tokens", table.prompt_tokens), ("output tokens", table.output_tokens)):
        lengths = lengths_of(column)
        if lengths is not None:
            lines.append(
                f"{name}: mean {lengths.mean:.1f}, p50 {lengths.p50:.0f}, p90 {lengths.p90:.0f}, "
                f"p99 {lengths.p99:.0f}, max {lengths.largest}"
            )
    counts = np.bincount(table.class_index, minlength=len(SERVICE_CLASSES))
    lines.append("classes: " + ", ".join(f"{service.name} {count}" for service, count in zip(SERVICE_CLASSES, counts, strict=True)))
    sessions = np.unique(table.session[table.session != NO_SESSION]).size
    lines.append(f"sessions: {sessions}" if sessions else "sessions: none in this trace")
    sharing = sharing_of(table)
    if sharing is None:
        lines.append("prefix sharing: no prefix blocks in this trace")
    else:
        gaps = "/".join(f"{gap:.0f}" for gap in sharing.gap_s_p10_p50_p90) if sharing.gap_s_p10_p50_p90 else "-"
        lines.append(
            f"prefix sharing: {sharing.blocks_per_request:.1f} blocks of {table.block_tokens} tokens a request; "
            f"with an endless cache {sharing.reused_fraction:.1%} of blocks, and more than the first block in "
            f"{sharing.requests_reusing_fraction:.1%} of requests, are reused; seconds since last use p10/50/90 {gaps}"
        )
    return lines
