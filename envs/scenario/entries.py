"""Rows of scenario files as pydantic models, and their way into domain values.

`extra="forbid"` and strict types: a misspelt key or a quoted number is an error, never a silent default.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from envs.domain.specs import GpuSpec, LinkSpec, ModelSpec
from envs.domain.suggestions import unknown_name
from envs.domain.units import GB, GIB, TFLOP, US

KERNEL_PROFILES = ("a100", "h100", "a40", "l40s", "b200", "rtx4090", "rtxpro6000", "v100", "l4", "t4")


def _known_profile(name: str) -> str:
    """One of those that come with the project, or `FILE.json#NAME` of one's own, FILE beside the cluster file."""
    if name not in KERNEL_PROFILES and not re.fullmatch(r"[^#\0]+\.json#[^#\0]+", name):
        raise ValueError(unknown_name("kernel profile", name, KERNEL_PROFILES) + "; or give FILE.json#NAME of a calibration of your own")
    return name


KernelProfile = Annotated[str, AfterValidator(_known_profile)]


class Entry(BaseModel):
    """Base of all rows."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class GpuEntry(Entry):
    """One GPU type; rates dense 16-bit with fp32 accumulation. Without usd_per_hour the price is unknown (0)."""

    name: str = Field(min_length=1)
    tflop_per_s: float = Field(gt=0)
    memory_gib: float = Field(ge=1)
    memory_gb_per_s: float = Field(gt=0)
    tdp_w: float = Field(gt=0)
    architecture: str = ""
    kernel_profile: KernelProfile
    link: str
    has_bf16: bool = True
    usd_per_hour: float = Field(default=0.0, ge=0)
    source: str
    checked: bool = False
    price_source: str = ""
    price_checked: bool = False

    def to_spec(self) -> GpuSpec:
        return GpuSpec(
            name=self.name,
            flop_per_s=self.tflop_per_s * TFLOP,
            memory_bytes=round(self.memory_gib * GIB),
            memory_bytes_per_s=self.memory_gb_per_s * GB,
            tdp_w=self.tdp_w,
            architecture=self.architecture,
            kernel_profile=self.kernel_profile,
            link=self.link,
            usd_per_hour=self.usd_per_hour,
            has_bf16=self.has_bf16,
        )


class LinkEntry(Entry):
    """One kind of link, one direction; gb_per_s in 10^9 bytes per second."""

    name: str = Field(min_length=1)
    latency_us: float = Field(ge=0)
    gb_per_s: float = Field(gt=0)
    source: str
    checked: bool = False

    def to_spec(self) -> LinkSpec:
        return LinkSpec(self.name, self.latency_us * US, 1.0 / (self.gb_per_s * GB))


class ModelEntry(Entry):
    """Shapes of one model, as its config.json states them; mlp_width is that of one expert where there are experts."""

    name: str = Field(min_length=1)
    family: str = ""
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    query_heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    mlp_width: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    context_tokens: int = Field(ge=1)
    experts: int = Field(default=0, ge=0)
    experts_active: int = Field(default=0, ge=0)
    tied_embeddings: bool = False
    parameters_billion: float | None = Field(default=None, gt=0)
    source: str
    checked: bool = False

    def to_spec(self, weight_dtype: str = "bf16", kv_dtype: str = "bf16") -> ModelSpec:
        shapes = self.model_dump(exclude={"family", "parameters_billion", "source", "checked"})
        return ModelSpec(weight_dtype=weight_dtype, kv_dtype=kv_dtype, **shapes)


class GpuCatalogue(Entry):
    gpus: list[GpuEntry]


class LinkCatalogue(Entry):
    links: list[LinkEntry]


class ModelCatalogue(Entry):
    models: list[ModelEntry]


class ModelChoice(Entry):
    """Which model every group serves, and in which number formats."""

    name: str
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"


class RankEntry(Entry):
    """`count` equal devices in one place. `{i}`, `{i//N}` and `{i%N}` in a place are filled with the replica's number."""

    gpu: str
    node: str = Field(min_length=1)
    switch: str = ""
    rack: str = ""
    count: int = Field(default=1, ge=1, le=1024)


class GroupEntry(Entry):
    """One TP group, or `count` equal ones named NAME-0, NAME-1, ..."""

    name: str = Field(min_length=1)
    ranks: list[RankEntry] = Field(min_length=1)
    count: int | None = Field(default=None, ge=1, le=1024)
    inner_link: str | None = None
    outer_link: str | None = None
    host_speed: float = Field(default=1.0, gt=0)
    parked: bool = False


class LimitsEntry(Entry):
    """Bounds of every group; see ClusterLimits. context_tokens is, unless given, the model's own or 8192 if that is less."""

    max_running: int = Field(default=128, ge=1, le=4096)
    queue_limit: int = Field(default=256, ge=1, le=65536)
    hold_limit: int = Field(default=256, ge=0, le=65536)
    kv_block_tokens: int = Field(default=16, ge=1, le=4096)
    context_tokens: int | None = Field(default=None, ge=1)
    kv_blocks: int | None = Field(default=None, ge=0)


class FaultEntry(Entry):
    """One scripted fault; `group` by name, `rank` by index (all ranks if absent), `size` a factor on times."""

    kind: Literal["slow_compute", "slow_memory", "slow_link", "slow_host", "lost_rank", "lost_group"]
    group: str
    start_s: float = Field(ge=0)
    length_s: float = Field(gt=0)
    rank: int | None = Field(default=None, ge=0)
    size: float = Field(default=2.0, ge=1)


class ClusterEntry(Entry):
    """A whole cluster file. own_gpus, own_links and own_models add to the catalogues, for this file only."""

    name: str = Field(min_length=1)
    description: str = ""
    model: ModelChoice
    groups: list[GroupEntry] = Field(min_length=1)
    limits: LimitsEntry = LimitsEntry()
    prices: dict[str, float] = Field(default_factory=dict)
    faults: list[FaultEntry] = Field(default_factory=list)
    own_gpus: list[GpuEntry] = Field(default_factory=list)
    own_links: list[LinkEntry] = Field(default_factory=list)
    own_models: list[ModelEntry] = Field(default_factory=list)
