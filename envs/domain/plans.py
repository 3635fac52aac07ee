"""Where a model runs (`TpGroup`, its ranks) and how its layers are cut over them (`SplitPlan`, per layer `LayerPlans`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envs.domain.specs import GpuSpec, LinkSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One device and where it sits: `rack`, `node` and `switch` name its place; equal names share it."""

    gpu: GpuSpec
    node: str
    switch: str = ""
    rack: str = ""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Widths per rank of every cut; each tuple has one entry per rank, zero allowed.

    query_heads, mlp_blocks, vocabulary_rows: counts; `mlp_block` is the MLP columns in one block.
    """

    query_heads: tuple[int, ...]
    mlp_blocks: tuple[int, ...]
    vocabulary_rows: tuple[int, ...]
    mlp_block: int = 1
    version: int = 0

    def __post_init__(self) -> None:
        if not len(self.query_heads) == len(self.mlp_blocks) == len(self.vocabulary_rows):
            raise ValueError(
                f"SplitPlan: cuts have unequal rank counts {len(self.query_heads)}, {len(self.mlp_blocks)}, "
                f"{len(self.vocabulary_rows)}; give one width per rank in each"
            )
        for name in ("query_heads", "mlp_blocks", "vocabulary_rows"):
            widths = getattr(self, name)
            if min(widths, default=0) < 0 or sum(widths) < 1:
                raise ValueError(f"SplitPlan: {name}={widths} needs widths >= 0 that sum to at least 1")

    @property
    def ranks(self) -> int:
        return len(self.query_heads)

    def check_covers(self, model: ModelSpec) -> None:
        """Raise ValueError unless the cuts cover the model exactly."""
        wanted = (
            ("query_heads", sum(self.query_heads), model.query_heads),
            ("mlp columns", sum(self.mlp_blocks) * self.mlp_block, model.mlp_width),
            ("vocabulary_rows", sum(self.vocabulary_rows), model.vocabulary),
        )
        for name, got, want in wanted:
            if got != want:
                raise ValueError(f"SplitPlan for {model.name!r}: {name} sum to {got}, the model has {want}")


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """One plan per layer, so that the average over layers can meet a ratio that no single cut meets (7:2 and 8:1 in turn).

    The vocabulary is cut once, not per layer: every entry states the same `vocabulary_rows`.
    """

    version: int
    layers: tuple[SplitPlan, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("LayerPlans: no layers; give one SplitPlan per layer of the model")
        first = self.layers[0]
        for index, plan in enumerate(self.layers):
            if plan.ranks != first.ranks:
                raise ValueError(
                    f"LayerPlans: layer {index} is cut over {plan.ranks} ranks, layer 0 over {first.ranks}; use one rank count"
                )
            if plan.vocabulary_rows != first.vocabulary_rows:
                raise ValueError(
                    f"LayerPlans: layer {index} has vocabulary_rows={plan.vocabulary_rows}, layer 0 {first.vocabulary_rows}; "
                    "the vocabulary has one cut, state it alike in every layer"
                )

    @classmethod
    def uniform(cls, plan: SplitPlan, layers: int) -> LayerPlans:
        """The same cut in each of `layers` layers, under the plan's own version."""
        return cls(plan.version, (plan,) * layers)

    @property
    def ranks(self) -> int:
        return self.layers[0].ranks

    @property
    def vocabulary_rows(self) -> tuple[int, ...]:
        return self.layers[0].vocabulary_rows

    def check_covers(self, model: ModelSpec) -> None:
        """Raise ValueError unless there is one plan per layer and each covers the model exactly."""
        if len(self.layers) != model.layers:
            raise ValueError(f"LayerPlans for {model.name!r}: {len(self.layers)} plans, the model has {model.layers} layers")
        for plan in dict.fromkeys(self.layers):
            plan.check_covers(model)


@dataclass(frozen=True, slots=True)
class TpGroup:
    """Ranks that serve one replica of `model` by tensor parallelism, and the links between them.

    `inner_link` joins ranks of one communication domain (a node), `outer_link` joins domains.
    """

    name: str
    model: ModelSpec
    ranks: tuple[RankPlace, ...]
    inner_link: LinkSpec
    outer_link: LinkSpec
    host_speed: float = 1.0

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError(f"TpGroup {self.name!r}: no ranks; give at least one")
        if self.host_speed <= 0:
            raise ValueError(f"TpGroup {self.name!r}: host_speed={self.host_speed} must be positive")

    def with_ranks_of(self, donor: TpGroup) -> TpGroup:
        """This group with the donor's ranks behind its own: its links stay, the slower of the two hosts sets the pace.

        Raises: ValueError where the two serve different models.
        """
        if donor.model != self.model:
            models = f"{self.model.name!r} and {donor.model.name!r}"
            raise ValueError(f"TpGroup {self.name!r}: {donor.name!r} cannot join it, they serve {models}; join groups of one model")
        return replace(self, ranks=self.ranks + donor.ranks, host_speed=min(self.host_speed, donor.host_speed))

    @property
    def domains(self) -> tuple[tuple[int, ...], ...]:
        """Communication domains: rank indices by node, in order of first appearance."""
        by_node: dict[tuple[str, str], list[int]] = {}
        for index, place in enumerate(self.ranks):
            by_node.setdefault((place.rack, place.node), []).append(index)
        return tuple(tuple(members) for members in by_node.values())

    @property
    def slowest_link(self) -> LinkSpec:
        """The slowest link between the group's ranks."""
        return self.outer_link if len(self.domains) > 1 else self.inner_link
