"""Cuts that differ by layer, so that the average over layers meets shares which no whole number of heads meets in one layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.domain.plans import LayerPlans, SplitPlan
from envs.domain.specs import ModelSpec
from envs.perf_model.memory_fit import apportion, default_mlp_block


def layer_plans(
    model: ModelSpec,
    shares: Sequence[float],
    *,
    mlp_shares: Sequence[float] | None = None,
    vocabulary_shares: Sequence[float] | None = None,
    mlp_block: int | None = None,
    version: int = 0,
) -> LayerPlans:
    """One plan per layer whose head and MLP widths average to `shares` within one unit over all layers.

    shares: one weight per rank, >= 0, in any unit; a rank of zero share gets zero width everywhere. `mlp_shares` and
    `vocabulary_shares` default to `shares` (attention and MLP end in barriers of their own, so they may differ). The
    vocabulary has a single cut, by largest remainder.
    Raises: ValueError for shares that are negative, not finite or all zero, and for an `mlp_block` that does not divide the MLP.
    """
    block = default_mlp_block(model) if mlp_block is None else mlp_block
    if block < 1 or model.mlp_width % block:
        raise ValueError(f"mlp_block={block} does not divide mlp_width={model.mlp_width} of {model.name!r}; give a divisor")
    mlp_shares = shares if mlp_shares is None else mlp_shares
    vocabulary_shares = shares if vocabulary_shares is None else vocabulary_shares
    for name, other in (("mlp_shares", mlp_shares), ("vocabulary_shares", vocabulary_shares)):
        if len(other) != len(shares):
            raise ValueError(f"layer_plans: {name} has {len(other)} ranks, shares has {len(shares)}; give one weight per rank in each")
    heads = diffused_widths(model.query_heads, shares, model.layers)
    blocks = diffused_widths(model.mlp_width // block, mlp_shares, model.layers)
    rows = apportion(model.vocabulary, vocabulary_shares)
    return LayerPlans(version, tuple(SplitPlan(h, b, rows, mlp_block=block, version=version) for h, b in zip(heads, blocks, strict=True)))


def diffused_widths(units: int, shares: Sequence[float], layers: int) -> list[tuple[int, ...]]:
    """`layers` integer cuts of `units`; what rounding left over in one layer is owed to the next (error diffusion).

    At every layer each rank's running total differs from its exact share by less than one unit per rank.
    """
    apportion(units, shares)  # the same demands on shares, said in the same words
    weights = np.asarray(shares, dtype=np.float64)
    exact = units * weights / weights.sum()
    owed = np.zeros_like(exact)
    cuts: list[tuple[int, ...]] = []
    for _ in range(layers):
        wanted = exact + owed
        widths = np.where(weights > 0, np.floor(np.maximum(wanted, 0.0) + 1e-9), 0.0)
        while widths.sum() > units:  # a debt clipped at zero pushed the others up
            widths[np.where(widths > 0, wanted - widths, np.inf).argmin()] -= 1
        while widths.sum() < units:
            widths[np.where(weights > 0, wanted - widths, -np.inf).argmax()] += 1
        owed = wanted - widths
        cuts.append(tuple(int(width) for width in widths))
    return cuts
