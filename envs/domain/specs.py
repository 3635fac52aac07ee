"""Specifications of hardware and models: what a datasheet or a model card states, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from envs.domain.units import GIB

NUMBER_BYTES: dict[str, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one number per dtype; quantisation scales are ignored (under 4 % for groups of 128)."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU type. Rates are dense 16-bit with fp32 accumulation, without sparsity.

    `kernel_profile` names the fitted coefficients in `envs.perf_model` (a measured GPU of the same
    architecture where this one was never measured).
    """

    name: str
    flop_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    tdp_w: float
    architecture: str
    kernel_profile: str
    link: str
    usd_per_hour: float = 0.0
    has_bf16: bool = True

    def __post_init__(self) -> None:
        if self.memory_bytes < GIB:
            raise ValueError(f"GpuSpec {self.name!r}: memory_bytes={self.memory_bytes} is under 1 GiB; give bytes, e.g. 80 * GIB")
        for field in ("flop_per_s", "memory_bytes_per_s", "tdp_w"):
            if getattr(self, field) <= 0:
                raise ValueError(f"GpuSpec {self.name!r}: {field}={getattr(self, field)} must be positive")


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One kind of link: latency per message (alpha, s) and time per byte (beta, s/byte) of one direction."""

    name: str
    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        if self.alpha_s < 0 or self.beta_s_per_byte <= 0:
            raise ValueError(f"LinkSpec {self.name!r}: alpha_s={self.alpha_s} must be >= 0 and beta_s_per_byte={self.beta_s_per_byte} > 0")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. `experts` = 0 means dense; otherwise `experts_active` of them run per token."""

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocabulary: int
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    experts: int = 0
    experts_active: int = 0
    tied_embeddings: bool = False
    context_tokens: int = 8192

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "query_heads", "kv_heads", "head_dim", "mlp_width", "vocabulary", "context_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"ModelSpec {self.name!r}: {field}={getattr(self, field)} must be at least 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"ModelSpec {self.name!r}: query_heads={self.query_heads} is no multiple of kv_heads={self.kv_heads}")
        for dtype in (self.weight_dtype, self.kv_dtype):
            if dtype not in NUMBER_BYTES:
                raise ValueError(f"ModelSpec {self.name!r}: dtype {dtype!r} unknown; known: {', '.join(NUMBER_BYTES)}")

    @property
    def weight_number_bytes(self) -> float:
        return NUMBER_BYTES[self.weight_dtype]

    @property
    def kv_bytes_per_token(self) -> float:
        """Key and value bytes of one token over all layers and KV heads."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * NUMBER_BYTES[self.kv_dtype]

    @property
    def attention_numbers_per_query_head(self) -> float:
        """Weights of one layer that follow one query head: its Q and O slices and its share of K and V."""
        group = self.query_heads // self.kv_heads
        return self.hidden * self.head_dim * (2.0 + 2.0 / group)

    @property
    def mlp_numbers_per_column(self) -> float:
        """Weights of one layer per MLP column (gate, up, down), over all experts held."""
        return 3.0 * self.hidden * max(1, self.experts)

    @property
    def weight_bytes(self) -> float:
        """All weights: layers, embedding and output head."""
        layer = self.query_heads * self.attention_numbers_per_query_head + self.mlp_width * self.mlp_numbers_per_column
        vocabulary = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return (self.layers * layer + vocabulary) * self.weight_number_bytes
