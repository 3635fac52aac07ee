"""One rank's part of the forward pass, for whatever ranges its plans give it.

Attention and MLP each end in one all-reduce of a partial sum; a rank of zero width adds zeros. Weights are views, so a new
plan is a set of new views.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from envs.domain.plans import LayerPlans
from runtime.torch_tp.checkpoint import Checkpoint
from runtime.torch_tp.kv_slots import SlotKv
from runtime.torch_tp.kv_store import KvStore, Span
from runtime.torch_tp.rope import RopeTable
from runtime.torch_tp.shares import Interval, RankShare, share_of

if TYPE_CHECKING:
    from runtime.torch_tp.communicators.interface import Communicator

LIVE_PLANS_MAX = 2


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a step: new `tokens` at positions start, start + 1, … of `slot`, under its plan's head ranges."""

    slot: int
    plan_version: int
    tokens: Tensor | Sequence[int]
    start: int
    wants_logits: bool = True


@dataclass(slots=True)
class StepTimings:
    """Where the last forward's time went, in seconds. compute_s is CPU time of this thread outside communication."""

    compute_s: float = 0.0
    communication_wait_s: float = 0.0
    memory_stall_s: float = 0.0
    host_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Views for one layer and one plan. `front`: queries missing before the first KV head's group is full."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    heads: Interval
    kv: Interval
    front: int


@dataclass(frozen=True, slots=True)
class MlpWeights:
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of a step that run under one plan."""

    version: int
    first: int
    last: int
    spans: tuple[Span, ...]


@dataclass(slots=True)
class _Layout:
    """One step, laid out: rows sorted by plan, so that each plan's rows are one range."""

    tokens: Tensor
    parts: list[_Part]
    cos: Tensor
    sin: Tensor
    logit_rows: list[int] = field(default_factory=list)


class TpModel:
    """One rank of a tensor-parallel model.

    checkpoint, communicator: see `checkpoint.py` and `communicators/interface.py`; `rank` is this rank's place in the plans.
    kv_tokens_max, slots_max: room of the KV store over all slots.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        communicator: Communicator,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        kv_tokens_max: int = 8192,
        slots_max: int = 64,
    ) -> None:
        self.checkpoint, self.config, self.communicator = checkpoint, checkpoint.config, communicator
        self.rank, self.device, self.dtype = rank, torch.device(device), dtype
        self.kv: KvStore = SlotKv(self.config, tokens_max=kv_tokens_max, slots_max=slots_max, device=self.device, dtype=dtype)
        self.timings = StepTimings()
        self.on_layer: Callable[[int], None] | None = None
        self._rope = RopeTable(self.config, self.config.context_tokens, self.device)
        self._shares: dict[int, RankShare] = {}
        self._attention: dict[int, list[AttentionWeights]] = {}
        self._mlp: list[MlpWeights] = []
        layers = range(self.config.layers)
        self._norms = [
            tuple(self._weight(f"model.layers.{i}.{name}.weight") for name in ("input_layernorm", "post_attention_layernorm"))
            for i in layers
        ]
        self._head_norms = [
            tuple(self._weight(f"model.layers.{i}.self_attn.{name}.weight") for name in ("q_norm", "k_norm")) if self.config.qk_norm else ()
            for i in layers
        ]
        self._last_norm = self._weight("model.norm.weight")
        self._embedding = checkpoint.tensor("model.embed_tokens.weight")

    # --- plans ------------------------------------------------------------------------------------------------------------

    @property
    def plan_versions(self) -> tuple[int, ...]:
        """Live plans, oldest first."""
        return tuple(self._shares)

    def share(self, version: int | None = None) -> RankShare:
        """This rank's ranges under a live plan; the newest by default."""
        return self._shares[self._newest if version is None else version]

    def use_plan(self, plan: LayerPlans) -> None:
        """Add a live plan. MLP and vocabulary follow it from the next step on, attention for slots allocated under it.

        Raises: ValueError when two plans are live already, or the plan does not fit the model.
        """
        if plan.version in self._shares:
            raise ValueError(f"plan version {plan.version} is live already; give a new version")
        if len(self._shares) >= LIVE_PLANS_MAX:
            raise ValueError(f"plans {list(self._shares)} are live; drop one before using version {plan.version}")
        share = share_of(plan, self.config, self.rank)
        attention = [self._attention_weights(i, share.query[i], share.kv[i]) for i in range(self.config.layers)]
        mlp = [self._mlp_weights(i, share.mlp[i]) for i in range(self.config.layers)]
        self.kv.add_plan(plan.version, share.kv)
        self._shares[plan.version], self._attention[plan.version] = share, attention
        self._follow(plan.version, mlp)

    def drop_plan(self, version: int) -> None:
        """Forget a plan that no slot uses. Dropping the newest returns MLP and vocabulary to the one before (an aborted switch)."""
        if version not in self._shares:
            raise ValueError(f"plan version {version} is not live; live: {list(self._shares)}")
        self.kv.drop_plan(version)
        del self._shares[version], self._attention[version]
        if version == self._newest and self._shares:
            newest = next(reversed(self._shares))
            self._follow(newest, [self._mlp_weights(i, cut) for i, cut in enumerate(self._shares[newest].mlp)])

    def _follow(self, version: int, mlp: list[MlpWeights]) -> None:
        self._newest = version
        self._mlp = mlp
        rows = self._shares[version].vocabulary
        self._head = self._on_device(self.checkpoint.output_head[rows.start : rows.end])

    def _weight(self, name: str) -> Tensor:
        return self._on_device(self.checkpoint.tensor(name))

    def _on_device(self, view: Tensor) -> Tensor:
        return view.to(device=self.device, dtype=self.dtype)

    def _rows(self, name: str, rows: Interval) -> Tensor:
        return self._on_device(self.checkpoint.tensor(name)[rows.start : rows.end])

    def _columns(self, name: str, columns: Interval) -> Tensor:
        return self._on_device(self.checkpoint.tensor(name)[:, columns.start : columns.end])

    def _attention_weights(self, layer: int, heads: Interval, kv: Interval) -> AttentionWeights:
        prefix, dim = f"model.layers.{layer}.self_attn.", self.config.head_dim
        ranges = {"q": heads.scaled(dim), "k": kv.scaled(dim), "v": kv.scaled(dim)}
        weights = {part: self._rows(f"{prefix}{part}_proj.weight", rows) for part, rows in ranges.items()}
        biases = {part: self._rows(f"{prefix}{part}_proj.bias", rows) if self.config.qkv_bias else None for part, rows in ranges.items()}
        return AttentionWeights(
            weights["q"],
            weights["k"],
            weights["v"],
            self._columns(f"{prefix}o_proj.weight", ranges["q"]),
            biases["q"],
            biases["k"],
            biases["v"],
            heads,
            kv,
            heads.start - kv.start * self.config.group if heads.width else 0,
        )

    def _mlp_weights(self, layer: int, columns: Interval) -> MlpWeights:
        prefix, has_bias = f"model.layers.{layer}.mlp.", self.config.mlp_bias
        return MlpWeights(
            self._rows(f"{prefix}gate_proj.weight", columns),
            self._rows(f"{prefix}up_proj.weight", columns),
            self._columns(f"{prefix}down_proj.weight", columns),
            self._rows(f"{prefix}gate_proj.bias", columns) if has_bias else None,
            self._rows(f"{prefix}up_proj.bias", columns) if has_bias else None,
        )

    # --- forward ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, slices: Sequence[Slice], *, all_logits: bool = False) -> Tensor:
        """Run one step. Returns float32 logits, shape (rows, own vocabulary rows).

        Rows are the last positions of the slices that want logits, in the order given; with `all_logits` every position of them.
        Raises: ValueError for an unknown plan or slot, or a slice that does not continue its slot; whatever the communicator
        raises, in which case no slot has grown and the step may be run again.
        """
        started_s, cpu_started_s = time.perf_counter(), time.thread_time()
        self._waited_s = self._wait_cpu_s = 0.0
        layout = self._lay_out(slices, all_logits)
        host_s = time.perf_counter() - started_s
        hidden = self._embedding[layout.tokens].to(device=self.device, dtype=self.dtype)
        for layer in range(self.config.layers):
            before_attention, before_mlp = self._norms[layer]
            hidden += self._reduced(self._attend(layer, layout, self._normed(hidden, before_attention)))
            hidden += self._reduced(self._mlp_partial(layer, self._normed(hidden, before_mlp)))
            if self.on_layer is not None:
                self.on_layer(layer)
        for part in layout.parts:
            self.kv.commit(part.spans)
        last = self._normed(hidden[layout.logit_rows], self._last_norm)
        logits = linear(last, self._head).float()
        self.timings = StepTimings(
            compute_s=time.thread_time() - cpu_started_s - self._wait_cpu_s,
            communication_wait_s=self._waited_s,
            host_s=host_s,
            wall_s=time.perf_counter() - started_s,
        )
        return logits

    def _lay_out(self, slices: Sequence[Slice], all_logits: bool) -> _Layout:
        if not slices:
            raise ValueError("forward got no slices; give at least one")
        tokens: list[int] = []
        rows: dict[int, list[int]] = {}
        parts: list[_Part] = []
        tables: list[tuple[Tensor, Tensor]] = []
        for version in self._shares:
            first, spans = len(tokens), []
            for index, piece in enumerate(slices):
                if piece.plan_version != version:
                    continue
                ids = piece.tokens.tolist() if isinstance(piece.tokens, Tensor) else list(piece.tokens)
                if not ids:
                    raise ValueError(f"slot {piece.slot}: a slice without tokens")
                spans.append(Span(piece.slot, len(tokens) - first, len(ids), piece.start))
                tables.append(self._rope.rows(piece.start, piece.start + len(ids)))
                if piece.wants_logits:
                    end = len(tokens) + len(ids)
                    rows[index] = list(range(len(tokens), end)) if all_logits else [end - 1]
                tokens += ids
            if spans:
                self.kv.begin(spans)
                parts.append(_Part(version, first, len(tokens), tuple(spans)))
        if sum(len(part.spans) for part in parts) != len(slices):
            unknown = sorted({piece.plan_version for piece in slices} - set(self._shares))
            raise ValueError(f"plan versions {unknown} are not live; live: {list(self._shares)}")
        cos, sin = (torch.cat(column)[:, None] if len(tables) > 1 else column[0][:, None] for column in zip(*tables, strict=True))
        logit_rows = [row for index in sorted(rows) for row in rows[index]]
        return _Layout(torch.tensor(tokens), parts, cos, sin, logit_rows)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, weight.shape, weight, self.config.rms_eps)

    def _attend(self, layer: int, layout: _Layout, x: Tensor) -> Tensor:
        partial = torch.empty_like(x)
        for part in layout.parts:
            rows = slice(part.first, part.last)
            self._attend_part(layer, part, x[rows], layout.cos[rows], layout.sin[rows], partial[rows])
        if self.config.output_bias and self.rank == 0:
            partial += self._weight(f"model.layers.{layer}.self_attn.o_proj.bias")
        return partial

    def _attend_part(self, layer: int, part: _Part, x: Tensor, cos: Tensor, sin: Tensor, partial: Tensor) -> None:
        weights = self._attention[part.version][layer]
        if weights.heads.width == 0:
            partial.zero_()
            return
        tokens, dim, group = x.shape[0], self.config.head_dim, self.config.group
        query = linear(x, weights.query, weights.query_bias).view(tokens, -1, dim)
        key = linear(x, weights.key, weights.key_bias).view(tokens, -1, dim)
        value = linear(x, weights.value, weights.value_bias).view(tokens, -1, dim)
        if self.config.qk_norm:
            query, key = (self._normed(heads, norm) for heads, norm in zip((query, key), self._head_norms[layer], strict=True))
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        first, last = weights.front, weights.front + weights.heads.width
        whole = weights.kv.width * group
        if last - first < whole:  # the cut runs through a group: zero queries stand in for the neighbour's
            padded = query.new_zeros((tokens, whole, dim))
            padded[:, first:last] = query
            query = padded
        out = torch.empty_like(query)
        shape = (tokens, weights.kv.width, group, dim)
        self.kv.attend(layer, part.spans, query.view(shape), key, value, out.view(shape))
        partial.copy_(linear(out.view(tokens, -1)[:, first * dim : last * dim], weights.output))

    def _mlp_partial(self, layer: int, x: Tensor) -> Tensor:
        weights = self._mlp[layer]
        if weights.gate.shape[0] == 0:
            partial = torch.zeros_like(x)
        else:
            partial = linear(silu(linear(x, weights.gate, weights.gate_bias)) * linear(x, weights.up, weights.up_bias), weights.down)
        if self.config.mlp_bias and self.rank == 0:
            partial += self._weight(f"model.layers.{layer}.mlp.down_proj.bias")
        return partial

    def _reduced(self, partial: Tensor) -> Tensor:
        started_s, cpu_s = time.perf_counter(), time.thread_time()
        self.communicator.all_reduce(partial)
        self._wait_cpu_s += time.thread_time() - cpu_s
        self._waited_s += time.perf_counter() - started_s
        return partial


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in half-split order; heads (tokens, heads, dim), cos and signed sin (tokens, 1, dim)."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)
