"""hypothesis strategies: plans of every kind that the engine must accept."""

from __future__ import annotations

from hypothesis import strategies as st

from envs.domain.plans import LayerPlans, SplitPlan
from envs.domain.specs import ModelSpec


def cuts(units: int, ranks: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Widths of `ranks` neighbouring ranges that cover `units`; zero widths are as likely as any."""
    ends = st.lists(st.integers(0, units), min_size=ranks - 1, max_size=ranks - 1).map(sorted)
    return ends.map(lambda marks: tuple(end - start for start, end in zip([0, *marks], [*marks, units], strict=True)))


@st.composite
def layer_plans(draw: st.DrawFn, model: ModelSpec, ranks: int, version: int, mlp_block: int) -> LayerPlans:
    """Cuts that differ from layer to layer, in heads and in MLP blocks."""
    rows = draw(cuts(model.vocabulary, ranks))
    layers = []
    for _ in range(model.layers):
        heads, blocks = draw(cuts(model.query_heads, ranks)), draw(cuts(model.mlp_width // mlp_block, ranks))
        layers.append(SplitPlan(heads, blocks, rows, mlp_block=mlp_block, version=version))
    return LayerPlans(version, tuple(layers))
