"""What makes a group impossible, whatever the plan: too many ranks, too little memory, a device in two places.

Only bounds that hold for every split are checked here; the split planner finds the plan and knows the exact fit.
"""

from __future__ import annotations

from collections.abc import Iterable

from envs.domain.plans import TpGroup
from envs.domain.specs import ModelSpec
from envs.domain.units import GB
from envs.perf_model import memory_fit

USABLE_FRACTION = 0.9
"""Share of a device's memory that weights and KV may take; the rest is left to the driver and the allocator."""


def possible_degrees(model: ModelSpec) -> range:
    """TP degrees the model can be split into: cuts may be uneven and a rank's width zero, but each head is whole."""
    return range(1, model.query_heads + 1)


def even_degrees(model: ModelSpec) -> tuple[int, ...]:
    """The degrees at which query heads, KV heads, MLP and vocabulary all divide evenly."""
    cuts = (model.query_heads, model.kv_heads, model.mlp_width, model.vocabulary)
    return tuple(degree for degree in possible_degrees(model) if not any(cut % degree for cut in cuts))


def degree_problem(model: ModelSpec, degree: int) -> str | None:
    """Why `degree` ranks are too many for `model`, or None."""
    if degree in possible_degrees(model):
        return None
    even = ", ".join(map(str, even_degrees(model)))
    return (
        f"{degree} ranks, but {model.name!r} has {model.query_heads} query heads and cannot be split into more parts; "
        f"possible degrees: 1 to {model.query_heads} (even ones: {even})"
    )


def memory_problem(group: TpGroup, kv_tokens: int) -> str | None:
    """Why `group` cannot hold its model, the workspace of a step and the KV of `kv_tokens` tokens at any split, or None.

    A bound on `envs.perf_model.memory_fit`'s own bytes: every rank carries norms and activations whatever its share, the rest
    is taken as divisible. What rounding to whole heads costs beyond that only the split planner knows.
    """
    room = memory_fit.fill_shares(group, kv_tokens, USABLE_FRACTION)
    if room.sum() >= 1.0:
        return None
    model, ranks = group.model, len(group.ranks)
    workspace = memory_fit.workspace_floor_bytes(model, ranks)
    usable = float(memory_fit.usable_bytes(group, USABLE_FRACTION).sum())
    return (
        f"{model.name!r} needs {model.weight_bytes / GB:.2f} GB of weights ({model.weight_dtype}), {workspace / GB:.2f} GB of "
        f"workspace and {model.kv_bytes_per_token * kv_tokens / GB:.3f} GB for one KV block; its {ranks} rank(s) offer "
        f"{usable / GB:.2f} GB ({USABLE_FRACTION:.0%} of memory); add ranks, take a smaller weight_dtype or a smaller model"
    )


def place_problem(groups: Iterable[TpGroup]) -> str | None:
    """Why the places contradict each other, or None: a node lies in one rack, a switch name on one node."""
    rack_of: dict[str, str] = {}
    node_of: dict[tuple[str, str], str] = {}
    for group in groups:
        for place in group.ranks:
            if rack_of.setdefault(place.node, place.rack) != place.rack:
                return f"node {place.node!r} lies in rack {rack_of[place.node]!r} and in {place.rack!r}; name the nodes apart"
            if place.switch and node_of.setdefault((place.rack, place.switch), place.node) != place.node:
                other = node_of[(place.rack, place.switch)]
                return f"switch {place.switch!r} lies on node {other!r} and on {place.node!r}; name the switches apart"
    return None
