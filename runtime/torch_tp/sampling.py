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
import torch
from torch import Tensor

from runtime.torch_tp.requests import SamplingSettings, TokenLogprobs
from runtime.torch_tp.steps import BROKEN_TOKEN, NewSlot

if TYPE_CHECKING:
    from runtime.torch_tp.shares import Interval

UNSORTED_SHARE = 1e-4  # top-p sorts only tokens at least this likely where they suffice


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
        chosen = _greedy(torch.stack(rows), vocabulary.start, communicator)
        for row, token in zip(greedy, chosen, strict=True):
            tokens[row] = token
    if whole:
        gathered = torch.cat([shard.cpu() for shard in communicator.all_gather(local_logits[whole].contiguous())], dim=-1)
        for row, logits in zip(whole, gathered, strict=True):
            tokens[row], logprobs[row] = _choose(logits, states[row], positions[row])
    for state, token in zip(states, tokens, strict=True):
        state.accept(token)
    stopped = any(state.is_stopped_by(token) for state, token in zip(states, tokens, strict=True))
    return SampledTokens(tuple(tokens), tuple(logprobs), stopped)


def _greedy(logits: Tensor, first_row: int, communicator: Gatherer) -> list[int]:
    """Ids of the largest logits (rows, own width); ties to the lowest id: `max` takes the first, and ranks ascend."""
    best = torch.full((2, logits.shape[0]), -torch.inf)
    if logits.shape[1]:
        value, place = logits.max(dim=1)
        best[0], best[1] = value.float().cpu(), (place + first_row).float().cpu()  # ids below 2^24 are exact in float32
    everyone = torch.stack(communicator.all_gather(best))  # (ranks, 2, rows)
    values = everyone[:, 0]
    largest, rank = values.max(dim=0)
    tokens = everyone[rank, 1, torch.arange(logits.shape[0])]
    sound = torch.isfinite(largest)  # max() passes a NaN on
    return [int(token) if is_sound else BROKEN_TOKEN for token, is_sound in zip(tokens, sound, strict=True)]


def _choose(logits: Tensor, state: SamplingState, position: int) -> tuple[int, TokenLogprobs | None]:
    """One row of the whole vocabulary, float32 (rows,) on the CPU."""
    adjusted = state.adjusted(logits, 0, position)
    if not bool(torch.isfinite(logits.max()) & torch.isfinite(adjusted.max())):
        return BROKEN_TOKEN, None if state.logprobs is None else TokenLogprobs(-math.inf)
    token = int(adjusted.argmax()) if state.settings.is_greedy else draw(adjusted, state.settings, state.seed, position)
    return token, None if state.logprobs is None else logprobs_of(logits, token, state.logprobs)


def logprobs_of(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """Logprobs of one row (rows,) under the model itself."""
    row = torch.log_softmax(logits.double(), dim=0)
    best, ids = torch.sort(row, descending=True, stable=True) if top else (row[:0], row[:0])
    return TokenLogprobs(float(row[token]), tuple((int(i), float(value)) for i, value in zip(ids[:top], best[:top], strict=True)))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that belongs to (seed, position). Source: Philox 4x64, Salmon et al., SC 2011: counter-based, no state."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def draw(logits: Tensor, settings: SamplingSettings, seed: int, position: int) -> int:
    """Draw from softmax(logits / temperature), float (rows,), cut by top_k, then top_p, then min_p; ids in ascending order."""
    weights, ids = _kept(logits.double() / settings.temperature, settings)
    reached = torch.cumsum(weights, dim=0)
    level = uniform(seed, position) * float(reached[-1])
    place = int(torch.searchsorted(reached, level, right=True))  # the first sum beyond the level: its weight is not 0
    if place == len(reached):  # the level was rounded up to the sum of all
        place = int(torch.nonzero(weights)[-1])
    return int(ids[place])


def _kept(scaled: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """(weights, ids) of the tokens that may be drawn, ids ascending; weights are relative to the likeliest token's."""
    weights = torch.exp(scaled - scaled.max())
    ids = torch.arange(len(weights))
    if 0 < settings.top_k < len(weights):
        ids = _likeliest(weights, settings.top_k)
        weights = weights[ids]
    if settings.top_p < 1.0:
        kept = _nucleus(weights, settings.top_p)
        ids, weights = ids[kept], weights[kept]
    if settings.min_p > 0.0:
        kept = torch.nonzero(weights >= settings.min_p)[:, 0]
        ids, weights = ids[kept], weights[kept]
    return weights, ids


def _likeliest(weights: Tensor, count: int) -> Tensor:
    """Places of the `count` largest, ascending; of equals at the edge the lowest places stay."""
    edge = torch.topk(weights, count).values[-1]
    above = torch.nonzero(weights > edge)[:, 0]
    level = torch.nonzero(weights == edge)[: count - len(above), 0]
    return torch.sort(torch.cat([above, level])).values


def _nucleus(weights: Tensor, share: float) -> Tensor:
    """Places of the smallest set of likeliest tokens whose weights reach `share` of the sum, ascending; ties to the lowest place.

    Tokens under UNSORTED_SHARE of the sum are left out of the sort where the others reach the share: they are less likely than
    all those, so the set cannot need them.
    """
    wanted = share * float(weights.sum())
    places = torch.nonzero(weights >= UNSORTED_SHARE * float(weights.sum()))[:, 0]
    if float(weights[places].sum()) < wanted:
        places = torch.arange(len(weights))
    order = torch.sort(weights[places], descending=True, stable=True).indices
    reached = torch.cumsum(weights[places][order], dim=0)
    count = min(int(torch.searchsorted(reached, wanted)) + 1, len(order))
    return torch.sort(places[order[:count]]).values
