"""The next token of each row, decided alike on every rank from a vocabulary that is cut unevenly over them.

Greedy rows cost one small all-gather of (largest logit, its id) per rank. Every other row is gathered whole and worked on in float64 on
the CPU, by the same code on every rank, so that unlike devices decide alike. Chance is a function of (seed, position) alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.torch_tp.requests import SamplingSettings, TokenLogprobs
from runtime.torch_tp.steps import BROKEN_TOKEN, NewSlot

if TYPE_CHECKING:
    from runtime.torch_tp.shares import Interval

NUCLEUS_SHARES = (1e-3, 1e-4, 1e-5, 1e-6, 0.0)
"""Top-p sorts only the tokens with at least such a share of the weight: the first share whose tokens suffice."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Gatherer(Protocol):
    """The one thing that sampling asks of a communicator: tensors of all ranks in rank order, unequal in the last dimension."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]: ...


class SamplingState:
    """What a rank remembers of one slot between steps: its settings and, where penalties need them, the tokens so far."""

    def __init__(self, new: NewSlot, vocabulary_rows: int) -> None:
        self.settings: SamplingSettings = new.sampling
        self.seed = new.seed
        self.stop_ids = tuple(token for token in new.stop_ids if token < vocabulary_rows)
        self.stop_from = new.stop_from
        self.logprobs = new.logprobs
        self._seen: Tensor | None = None
        self._output_counts: Tensor | None = None
        if new.sampling.counts_tokens:
            self._seen = torch.zeros(vocabulary_rows, dtype=torch.bool)
            self._seen[list(new.prompt + new.output)] = True
            self._output_counts = torch.bincount(torch.tensor(new.output, dtype=torch.int64), minlength=vocabulary_rows).float()

    @property
    def is_plain_greedy(self) -> bool:
        """Whether (largest logit, its id) per rank is enough to go on."""
        return self.settings.is_greedy and self.logprobs is None

    def accept(self, token: int) -> None:
        """The token was chosen: penalties count it from now on."""
        if self._seen is not None and self._output_counts is not None and token != BROKEN_TOKEN:
            self._seen[token] = True
            self._output_counts[token] += 1.0

    def is_stopped_by(self, token: int) -> bool:
        return token in self.stop_ids or token == BROKEN_TOKEN

    def adjusted(self, logits: Tensor, first_row: int, position: int) -> Tensor:
        """Logits (rows,) of vocabulary rows first_row, first_row + 1, … with penalties and bans applied; a copy where they change.

        Source: repetition penalty, Keskar et al., CTRL, 2019; presence and frequency penalties as in the OpenAI API.
        """
        settings = self.settings
        last_row = first_row + logits.shape[0]
        if self._seen is not None and self._output_counts is not None:
            seen = self._seen[first_row:last_row].to(logits.device)
            counts = self._output_counts[first_row:last_row].to(logits.device)
            factor = settings.repetition_penalty
            repeated = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(seen, repeated, logits)
            logits = logits - settings.frequency_penalty * counts - settings.presence_penalty * (counts > 0)
        if position < self.stop_from:
            banned = [token - first_row for token in self.stop_ids if first_row <= token < last_row]
            if banned:
                logits = logits.clone()
                logits[banned] = -torch.inf
        return logits


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row, BROKEN_TOKEN where the logits hold NaN or nothing finite. logprobs: None where not asked for.
    has_stopped: some row is broken or chose one of its stop ids."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    has_stopped: bool


def sample(
    local_logits: Tensor,
    vocabulary: Interval,
    communicator: Gatherer,
    states: Sequence[SamplingState],
    positions: Sequence[int],
) -> SampledTokens:
    """Choose each row's next token, the same on every rank, and let its state count it.

    Args: local_logits float32 (rows, vocabulary.width), width 0 allowed; vocabulary: this rank's rows, the ranks' intervals ascending
    and without gaps; states, positions: one per row; a position is the new token's index in prompt + answer.
    """
    if not local_logits.shape[0] == len(states) == len(positions):
        raise ValueError(f"sample: {local_logits.shape[0]} rows of logits for {len(states)} states and {len(positions)} positions")
    greedy = [row for row, state in enumerate(states) if state.is_plain_greedy]
    whole = [row for row, state in enumerate(states) if not state.is_plain_greedy]
    tokens = [0] * len(states)
    logprobs: list[TokenLogprobs | None] = [None] * len(states)
    if greedy:
        rows = [states[row].adjusted(local_logits[row], vocabulary.start, positions[row]) for row in greedy]
        for row, token in zip(greedy, _greedy(rows, vocabulary.start, communicator), strict=True):
            tokens[row] = token
    if whole:
        shards = communicator.all_gather(local_logits[whole].contiguous())
        gathered = torch.cat([shard.cpu() for shard in shards], dim=-1)
        for row, logits in zip(whole, gathered, strict=True):
            tokens[row], logprobs[row] = _choose(logits, states[row], positions[row])
    for state, token in zip(states, tokens, strict=True):
        state.accept(token)
    stopped = any(state.is_stopped_by(token) for state, token in zip(states, tokens, strict=True))
    return SampledTokens(tuple(tokens), tuple(logprobs), stopped)


def _greedy(rows: Sequence[Tensor], first_row: int, communicator: Gatherer) -> list[int]:
    """Ids of the largest logits of rows (own width,); ties to the lowest id: `argmax` takes the first, and ranks ascend."""
    best = np.full((2, len(rows)), -np.inf, dtype=np.float32)
    for place, row in enumerate(rows if rows[0].shape[0] else ()):
        values = row.cpu().numpy() if row.dtype == torch.float32 else row.float().cpu().numpy()
        index = int(values.argmax())  # a NaN counts as the largest
        best[:, place] = values[index], first_row + index  # ids below 2^24 are exact in float32
    everyone = torch.stack(communicator.all_gather(torch.from_numpy(best))).numpy()  # (ranks, 2, rows)
    owner = everyone[:, 0].argmax(axis=0)
    chosen = everyone[owner, :, np.arange(len(rows))]
    return [int(token) if np.isfinite(value) else BROKEN_TOKEN for value, token in chosen]


def _choose(logits: Tensor, state: SamplingState, position: int) -> tuple[int, TokenLogprobs | None]:
    """One row of the whole vocabulary, float32 (rows,) on the CPU."""
    adjusted = state.adjusted(logits, 0, position).double().numpy()
    raw = logits.double().numpy()
    if not (np.isfinite(raw.max()) and np.isfinite(adjusted.max())):
        return BROKEN_TOKEN, None if state.logprobs is None else TokenLogprobs(-math.inf)
    token = int(adjusted.argmax()) if state.settings.is_greedy else draw(adjusted, state.settings, state.seed, position)
    return token, None if state.logprobs is None else logprobs_of(raw, token, state.logprobs)


def logprobs_of(logits: FloatArray, token: int, top: int) -> TokenLogprobs:
    """Logprobs of one row (rows,) under the model itself."""
    largest = logits.max()
    log_total = float(largest + np.log(np.exp(logits - largest).sum()))
    best = _likeliest(logits, top) if top < len(logits) else np.arange(len(logits))
    best = best[np.argsort(-logits[best], kind="stable")]
    return TokenLogprobs(float(logits[token]) - log_total, tuple((int(i), float(logits[i]) - log_total) for i in best))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that belongs to (seed, position). Source: Philox 4x64, Salmon et al., SC 2011: counter-based, no state."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def draw(logits: FloatArray, settings: SamplingSettings, seed: int, position: int) -> int:
    """Draw from softmax(logits / temperature), shape (rows,), cut by top_k, then top_p, then min_p; ids in ascending order."""
    with np.errstate(over="ignore"):  # the likeliest first brought to 0: however small the temperature, it alone stays
        scaled = (logits - logits.max()) / settings.temperature
    weights, ids = _kept(scaled, settings)
    reached = np.cumsum(weights)
    place = int(np.searchsorted(reached, uniform(seed, position) * reached[-1], side="right"))  # beyond the level: its weight is not 0
    if place == len(reached):  # the level was rounded up to the sum of all
        place = int(np.flatnonzero(weights)[-1])
    return int(ids[place])


def _kept(scaled: FloatArray, settings: SamplingSettings) -> tuple[FloatArray, IntArray]:
    """(weights, ids) of the tokens that may be drawn, ids ascending; weights are relative to the likeliest token's, which `scaled` has at
    0."""
    weights = np.exp(scaled)
    ids = np.arange(len(weights))
    if 0 < settings.top_k < len(weights):
        ids = _likeliest(weights, settings.top_k)
        weights = weights[ids]
    if settings.top_p < 1.0:
        kept = _nucleus(weights, settings.top_p)
        ids, weights = ids[kept], weights[kept]
    if settings.min_p > 0.0:
        kept = np.flatnonzero(weights >= settings.min_p)
        ids, weights = ids[kept], weights[kept]
    return weights, ids


def _likeliest(weights: FloatArray, count: int) -> IntArray:
    """Places of the `count` < len(weights) largest, ascending; of equals at the edge the lowest places stay."""
    if count == 0:
        return np.arange(0)
    edge = np.partition(weights, len(weights) - count)[len(weights) - count]
    above = np.flatnonzero(weights > edge)
    level = np.flatnonzero(weights == edge)[: count - len(above)]
    return np.sort(np.concatenate([above, level]))


def _nucleus(weights: FloatArray, share: float) -> IntArray:
    """Places of the smallest set of likeliest tokens whose weights reach `share` of the sum, ascending; ties to the lowest place.

    Only tokens above a threshold are sorted, where they suffice: the others are less likely than all of them, so the set cannot
    need them.
    """
    total = weights.sum()
    for least in NUCLEUS_SHARES:
        places = np.flatnonzero(weights >= least * total)
        if least == 0.0 or weights[places].sum() >= share * total:
            break
    order = np.argsort(-weights[places], kind="stable")
    reached = np.cumsum(weights[places][order])
    count = min(int(np.searchsorted(reached, share * total)) + 1, len(order))
    return np.sort(places[order[:count]])
