"""The networks: one score per candidate (`CandidateScorer`), one value per state (`ValueNet`), and the frozen
scaling in front of both (`ObservationNormaliser`). Plain torch; training and export live elsewhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}

SCALE_FLOOR = 1e-3
"""A feature that hardly moved while recording is not blown up: its scale is 1 instead."""


class ObservationNormaliser(nn.Module):
    """Frozen affine scaling with a clip, fitted once before training and carried inside the module (buffers).

    Also remembers the range of each raw feature seen in training, which a bundle ships so that the service can tell
    an observation it was never trained on.
    """

    candidate_mean: Tensor
    candidate_scale: Tensor
    context_mean: Tensor
    context_scale: Tensor
    candidate_low: Tensor
    candidate_high: Tensor
    context_low: Tensor
    context_high: Tensor
    clip: Tensor
    is_fitted: Tensor

    def __init__(self, features: int, context: int, clip: float = 5.0) -> None:
        super().__init__()
        for part, width in (("candidate", features), ("context", context)):
            self.register_buffer(f"{part}_mean", torch.zeros(width))
            self.register_buffer(f"{part}_scale", torch.ones(width))
            self.register_buffer(f"{part}_low", torch.full((width,), torch.inf))
            self.register_buffer(f"{part}_high", torch.full((width,), -torch.inf))
        self.register_buffer("clip", torch.tensor(float(clip)))
        self.register_buffer("is_fitted", torch.tensor(0.0))

    def forward(self, candidates: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Scale candidates (..., C, F) and context (..., K); same shapes, within [-clip, clip]."""
        low, high = -self.clip, self.clip
        scaled_candidates = ((candidates - self.candidate_mean) / self.candidate_scale).clamp(low, high)
        scaled_context = ((context - self.context_mean) / self.context_scale).clamp(low, high)
        return scaled_candidates, scaled_context

    def fit(self, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray) -> None:
        """Set mean and scale from recorded observations: candidates (N, C, F), context (N, K), mask (N, C).

        Only rows with mask 1 count. May be called once: scaling that moves under a trained network is fault K03.
        Raises: RuntimeError on a second call; ValueError when nothing was recorded.
        """
        if bool(self.is_fitted):
            raise RuntimeError("observation scaling is already fitted and frozen; build a new policy to fit it again")
        rows = candidates[mask > 0.5].astype(np.float64)
        if len(rows) == 0:
            raise ValueError("no candidate row with mask 1 was recorded; record observations before fitting the scaling")
        for part, values in (("candidate", rows), ("context", context.astype(np.float64))):
            spread = values.std(axis=0)
            scale = np.where(spread < SCALE_FLOOR, 1.0, spread)
            getattr(self, f"{part}_mean").copy_(torch.from_numpy(values.mean(axis=0)))
            getattr(self, f"{part}_scale").copy_(torch.from_numpy(scale))
        self.is_fitted.fill_(1.0)
        self.widen_ranges(candidates, context, mask)

    def widen_ranges(self, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray) -> None:
        """Include recorded observations (shapes as in `fit`) in the training ranges. Does not touch the scaling."""
        rows = candidates[mask > 0.5]
        for part, values in (("candidate", rows), ("context", context)):
            if len(values) == 0:
                continue
            low, high = getattr(self, f"{part}_low"), getattr(self, f"{part}_high")
            low.copy_(torch.minimum(low, torch.as_tensor(values.min(axis=0), dtype=low.dtype)))
            high.copy_(torch.maximum(high, torch.as_tensor(values.max(axis=0), dtype=high.dtype)))


def masked_pool(embedded: Tensor, mask: Tensor) -> Tensor:
    """Mean and maximum over the candidates with mask 1: (B, C, H), (B, C) -> (B, 2H); zeros where none has."""
    weights = mask.unsqueeze(-1)
    count = weights.sum(dim=1)
    mean = (embedded * weights).sum(dim=1) / count.clamp(min=1.0)
    highest = embedded.masked_fill(weights < 0.5, -torch.inf).amax(dim=1)
    highest = torch.where(count > 0.5, highest, torch.zeros_like(highest))
    return torch.cat([mean, highest], dim=-1)


class _PooledTrunk(nn.Module):
    """Embedding of every candidate with its context, pooled over the candidates."""

    def __init__(self, features: int, context: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.activate = ACTIVATIONS[activation]()
        # Two narrow layers instead of one over the concatenation: the context part is computed once per state.
        self.embed_candidate = nn.Linear(features, hidden)
        self.embed_context = nn.Linear(context, hidden, bias=False)

    def pool(self, candidates: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        embedded = self.activate(self.embed_candidate(candidates) + self.embed_context(context).unsqueeze(1))
        return masked_pool(embedded, mask)


class CandidateScorer(_PooledTrunk):
    """One logit per candidate from shared weights, for any number of candidates, in any order.

    logit_i = out(act(h2(act(h1([c_i, context, pool]))))) + residual(c_i), where pool is the masked mean and maximum of
    the candidates' embeddings. The last layer and the residual start at zero: every candidate is equally likely.
    """

    def __init__(self, features: int, context: int, hidden: int = 64, activation: str = "tanh") -> None:
        super().__init__(features, context, hidden, activation)
        self.first_candidate = nn.Linear(features, hidden)
        self.first_context = nn.Linear(context, hidden, bias=False)
        self.first_pool = nn.Linear(2 * hidden, hidden, bias=False)
        self.second = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1)
        self.residual = nn.Linear(features, 1, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        nn.init.zeros_(self.residual.weight)

    def forward(self, candidates: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Scaled candidates (B, C, F), context (B, K), mask (B, C) -> logits (B, C), not yet masked."""
        pooled = self.pool(candidates, context, mask)
        state = self.first_context(context) + self.first_pool(pooled)
        hidden = self.activate(self.first_candidate(candidates) + state.unsqueeze(1))
        hidden = self.activate(self.second(hidden))
        return (self.out(hidden) + self.residual(candidates)).squeeze(-1)


class ValueNet(_PooledTrunk):
    """Value of a state from its own weights. Sharing a trunk with the scorer moved the policy when only the critic learnt."""

    def __init__(self, features: int, context: int, hidden: int = 64, activation: str = "tanh") -> None:
        super().__init__(features, context, hidden, activation)
        self.first = nn.Linear(context + 2 * hidden, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, candidates: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Scaled candidates (B, C, F), context (B, K), mask (B, C) -> values (B, 1)."""
        pooled = self.pool(candidates, context, mask)
        hidden = self.activate(self.first(torch.cat([context, pooled], dim=-1)))
        return self.out(self.activate(self.second(hidden)))
