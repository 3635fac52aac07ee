"""Synthetic twins of three public traces, drawn from their published statistics: for when no trace is at hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from envs.domain.requests import CLASS_INDEX
from envs.domain.suggestions import unknown_name
from envs.traces import twin_parameters as parameters
from envs.traces.trace_row import TraceError
from envs.traces.trace_table import NO_LIMIT, NO_PRIORITY, TraceTable
from envs.traces.twin_parameters import LengthMixture, MovingRate

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_RATE_STEP_S = 1.0


def draw_lengths(mixture: LengthMixture, size: int, rng: np.random.Generator) -> IntArray:
    """Tokens, shape (size,): a component per request, then its lognormal, held inside the mixture's bounds."""
    weights, mus, sigmas = (np.array(column) for column in zip(*mixture.components, strict=True))
    choice = rng.choice(weights.size, size=size, p=weights / weights.sum())
    tokens = np.exp(mus[choice] + sigmas[choice] * rng.standard_normal(size))
    return np.clip(np.rint(tokens), mixture.least, mixture.most).astype(np.int64)


def moving_rate_per_s(moving: MovingRate, duration_s: float, rate_scale: float, rng: np.random.Generator) -> FloatArray:
    """The rate in requests/s for each step of _RATE_STEP_S, mean rate x scale; exp of a stationary OU process."""
    steps = max(1, int(np.ceil(duration_s / _RATE_STEP_S)))
    keep = float(np.exp(-_RATE_STEP_S / moving.memory_s))
    noise = rng.standard_normal(steps) * moving.sigma * np.sqrt(1.0 - keep**2)
    level = np.empty(steps)
    value = rng.standard_normal() * moving.sigma
    for step in range(steps):
        value = keep * value + noise[step]
        level[step] = value
    return moving.rate_per_s * rate_scale * np.exp(level - moving.sigma**2 / 2.0)


def _near_poisson_arrivals_s(duration_s: float, rate_scale: float, rng: np.random.Generator) -> FloatArray:
    """Gamma renewals of mean gap 1 in operational time, mapped back through the integral of the moving rate."""
    rate = moving_rate_per_s(parameters.CONV_RATE, duration_s, rate_scale, rng)
    done = np.concatenate(([0.0], np.cumsum(rate * _RATE_STEP_S)))
    shape = parameters.CONV_GAP_SHAPE
    gaps = rng.gamma(shape, 1.0 / shape, int(done[-1] + 8.0 * np.sqrt(done[-1]) + 32))
    ticks = np.cumsum(gaps)
    arrival_s = np.interp(ticks[ticks < done[-1]], done, np.arange(done.size) * _RATE_STEP_S)
    return arrival_s[arrival_s < duration_s]


def _on_off_arrivals_s(duration_s: float, rate_scale: float, rng: np.random.Generator) -> FloatArray:
    """Bursts and silences; `rate_scale` divides every gap, so that the pattern stays and the clock runs faster."""
    now_s, end_s = 0.0, duration_s * rate_scale
    pieces: list[FloatArray] = []
    short_chance, short_mean_s = parameters.CODE_SILENCE_SHORT
    while now_s < end_s:
        size = parameters.CODE_BURST_MEDIAN * np.exp(parameters.CODE_BURST_SIGMA * rng.standard_normal())
        count = int(np.clip(np.rint(size), 1, parameters.CODE_BURST_MOST))
        sigma = parameters.CODE_BURST_RATE_SIGMA
        burst_rate = parameters.CODE_BURST_RATE_PER_S * np.exp(sigma * rng.standard_normal() + sigma**2 / 2.0)
        gaps_s = rng.exponential(1.0 / burst_rate, count - 1)
        times_s = now_s + np.concatenate(([0.0], np.cumsum(np.minimum(gaps_s, parameters.CODE_BURST_GAP_MOST_S))))
        pieces.append(times_s)
        mean_s = short_mean_s if rng.random() < short_chance else parameters.CODE_SILENCE_LONG_S
        now_s = float(times_s[-1]) + min(1.0 + rng.exponential(mean_s), parameters.CODE_SILENCE_MOST_S)
    arrival_s = np.concatenate(pieces)
    return arrival_s[arrival_s < end_s] / rate_scale


def _client_sessions(count: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
    """Session codes, shape (count,), and names `client-<k>/<n>`: clients by share, sessions of geometric length."""
    shares = np.array(parameters.CLIENT_SHARES)
    client = rng.choice(shares.size, size=count, p=shares / shares.sum())
    opens = rng.random(count) < 1.0 / parameters.REQUESTS_PER_SESSION
    number = np.zeros(shares.size, dtype=np.int64)
    names: dict[str, int] = {}
    codes = np.empty(count, dtype=np.int32)
    for i in range(count):
        number[client[i]] += opens[i]
        codes[i] = names.setdefault(f"client-{client[i]}/{number[client[i]]}", len(names))
    return codes, tuple(names)


def _azure_twin(
    kind: str, arrivals: Callable[..., FloatArray], duration_s: float, rate_scale: float, rng: np.random.Generator
) -> TraceTable:
    arrivals_rng, lengths_rng, sessions_rng = rng.spawn(3)
    is_code = kind == "azure-code"
    arrival_s = arrivals(duration_s, rate_scale, arrivals_rng)
    prompt = draw_lengths(parameters.CODE_PROMPT if is_code else parameters.CONV_PROMPT, arrival_s.size, lengths_rng)
    output = draw_lengths(parameters.CODE_OUTPUT if is_code else parameters.CONV_OUTPUT, arrival_s.size, lengths_rng)
    codes, names = _client_sessions(arrival_s.size, sessions_rng)
    none = (np.zeros(arrival_s.size + 1, np.int64), np.empty(0, np.int64), 0)
    return _table(kind, "code" if is_code else "chat", arrival_s, prompt, output, codes, names, none)


def _ticked_arrivals_s(duration_s: float, rate_scale: float, spread: bool, rng: np.random.Generator) -> FloatArray:
    """Poisson counts per 3 s tick under a moving rate; all of a tick share its stamp unless spread over it."""
    rate = moving_rate_per_s(parameters.MOONCAKE_RATE, duration_s, rate_scale, rng)
    start_s = np.arange(0.0, duration_s, parameters.MOONCAKE_TICK_S)
    middle = np.minimum((start_s / _RATE_STEP_S).astype(np.int64) + 1, rate.size - 1)
    width_s = np.minimum(parameters.MOONCAKE_TICK_S, duration_s - start_s)
    counts = rng.poisson(rate[middle] * width_s)
    arrival_s = np.repeat(start_s, counts)
    if not spread:
        return arrival_s
    return np.sort(arrival_s + rng.random(arrival_s.size) * np.repeat(width_s, counts))


def _predecessor(
    target_s: float, wanted_blocks: float, arrival_s: FloatArray, blocks: IntArray, is_free: npt.NDArray[np.bool_], now: int
) -> int:
    """The request to continue: near `target_s` in time, not continued yet, and nearest in size; -1 for none.

    Among the 96 requests around that time only the size decides, which keeps gaps and shared blocks both as drawn.
    """
    middle = int(np.searchsorted(arrival_s[:now], target_s))
    low, high = max(0, middle - 48), min(now, middle + 48)
    if high <= low:
        return -1
    choice = np.flatnonzero(is_free[low:high] & (arrival_s[low:high] < arrival_s[now]) & (blocks[low:high] > 1))
    if not choice.size:
        return -1
    return low + int(choice[np.abs(np.log(blocks[low + choice] / max(wanted_blocks, 1.0))).argmin()])


def _mooncake_twin(kind: str, duration_s: float, rate_scale: float, spread: bool, rng: np.random.Generator) -> TraceTable:
    arrivals_rng, lengths_rng, sharing_rng = rng.spawn(3)
    arrival_s = _ticked_arrivals_s(duration_s, rate_scale, spread, arrivals_rng)
    count = arrival_s.size
    prompt = draw_lengths(parameters.MOONCAKE_PROMPT, count, lengths_rng)
    output = draw_lengths(parameters.MOONCAKE_OUTPUT, count, lengths_rng)
    blocks = -(-prompt // parameters.MOONCAKE_BLOCK_TOKENS)
    lean = blocks.astype(np.float64) ** parameters.MOONCAKE_CONTINUED_EXPONENT
    chance = parameters.MOONCAKE_CONTINUED_FRACTION * lean / (lean.mean() if count else 1.0)
    continues = sharing_rng.random(count) < chance
    gap_s = parameters.MOONCAKE_GAP_MEDIAN_S * np.exp(parameters.MOONCAKE_GAP_SIGMA * sharing_rng.standard_normal(count))
    share = sharing_rng.beta(*parameters.MOONCAKE_SHARED_BETA, count)
    is_free = np.ones(count, dtype=np.bool_)
    session = np.empty(count, dtype=np.int32)
    sessions, next_id = 0, 1  # id 0 is the block that all requests begin with
    pieces: list[IntArray] = []
    for i in range(count):
        before = -1
        if continues[i] and arrival_s[i] > gap_s[i]:
            before = _predecessor(arrival_s[i] - gap_s[i], share[i] * blocks[i], arrival_s, blocks, is_free, i)
        if before < 0:
            kept, session[i] = np.zeros(1, np.int64), sessions
            sessions += 1
        else:
            is_free[before] = False
            # The last block of a prompt is partial, so whoever continues it fills it into another block.
            kept = pieces[before][: max(1, min(blocks[before] - 1, blocks[i] - 1))]
            session[i] = session[before]
        fresh = int(blocks[i]) - kept.size
        pieces.append(np.concatenate((kept[: blocks[i]], np.arange(next_id, next_id + fresh))))
        next_id += fresh
    offsets = np.concatenate(([0], np.cumsum(blocks))).astype(np.int64)
    prefix = (offsets, np.concatenate(pieces) if pieces else np.empty(0, np.int64), parameters.MOONCAKE_BLOCK_TOKENS)
    return _table(kind, "chat", arrival_s, prompt, output, session, tuple(f"chat-{k}" for k in range(sessions)), prefix)


def _table(
    kind: str,
    service: str,
    arrival_s: FloatArray,
    prompt: IntArray,
    output: IntArray,
    session: npt.NDArray[np.int32],
    names: tuple[str, ...],
    prefix: tuple[IntArray, IntArray, int],
) -> TraceTable:
    count = arrival_s.size
    return TraceTable(
        arrival_s=arrival_s,
        prompt_tokens=prompt.astype(np.int32),
        output_tokens=output.astype(np.int32),
        class_index=np.full(count, CLASS_INDEX[service], np.int8),
        session=session,
        session_names=names,
        priority=np.full(count, NO_PRIORITY, np.int16),
        output_limit_tokens=np.full(count, NO_LIMIT, np.int32),
        prefix_offsets=prefix[0],
        prefix_ids=prefix[1],
        block_tokens=prefix[2],
        source=f"synthetic twin of {kind}",
        synthetic=True,
    )


TWINS: tuple[str, ...] = ("azure-conv", "azure-code", "mooncake")


def synthesize(
    kind: str,
    duration_s: float = 3600.0,
    rate_scale: float = 1.0,
    rng: np.random.Generator | None = None,
    spread_ticks: bool = False,
) -> TraceTable:
    """Draw a twin of `duration_s` seconds; the same generator state gives the same table.

    kind: one of TWINS. rate_scale: multiplies the mean rate. rng: default_rng(0) when absent. spread_ticks: spread
    Mooncake's 3 s ticks instead of reproducing them. Raises TraceError for an unknown kind or values not positive.
    """
    if kind not in TWINS:
        raise TraceError(unknown_name("synthetic twin", kind, TWINS))
    for name, value in (("duration_s", duration_s), ("rate_scale", rate_scale)):
        if not (value > 0 and np.isfinite(value)):
            raise TraceError(f"synthesize {kind}: {name}={value} must be positive and finite")
    rng = np.random.default_rng(0) if rng is None else rng
    if kind == "mooncake":
        return _mooncake_twin(kind, duration_s, rate_scale, spread_ticks, rng)
    return _azure_twin(kind, _on_off_arrivals_s if kind == "azure-code" else _near_poisson_arrivals_s, duration_s, rate_scale, rng)
