"""The forward pass in torch operations: many rows on a CPU, any number on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from runtime.torch_tp.checkpoint import Checkpoint
from runtime.torch_tp.kv_store import KvStore
from runtime.torch_tp.shares import Interval, RankShare
from runtime.torch_tp.step_layout import Part, StepLayout


@dataclass(frozen=True, slots=True)
class _Attention:
    """One layer's matrices for one plan. `front`: queries missing before the first KV head's group is full."""

    projections: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    output: Tensor
    heads: int
    kv_heads: int
    front: int


@dataclass(frozen=True, slots=True)
class _Mlp:
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None


class TorchStep:
    """Implements `model.Step`. On a CPU every matrix is a view of the mapped file; on a device a share's matrices are copied there."""

    def __init__(
        self, checkpoint: Checkpoint, kv: KvStore, shares: Mapping[int, RankShare], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._checkpoint, self._config, self._kv, self._shares = checkpoint, checkpoint.config, kv, shares
        self._device, self._dtype = device, dtype
        self._attention: dict[tuple[int, Interval], _Attention] = {}
        self._mlp: dict[tuple[int, Interval], _Mlp] = {}
        self._head: tuple[Interval, Tensor] | None = None
        prefixes = [f"model.layers.{layer}." for layer in range(self._config.layers)]
        self._input_norms = [self._whole(prefix + "input_layernorm.weight") for prefix in prefixes]
        self._post_norms = [self._whole(prefix + "post_attention_layernorm.weight") for prefix in prefixes]
        self._head_norms = [
            [self._whole(f"{prefix}self_attn.{part}_norm.weight") for part in "qk"] if self._config.qk_norm else [] for prefix in prefixes
        ]
        self._last_norm = self._whole("model.norm.weight")

    # --- weights ----------------------------------------------------------------------------------------------------------

    def prepare(self, share: RankShare) -> None:
        """Have everything of a share in place, so that no step waits for it."""
        for layer in range(self._config.layers):
            self._attention_of(layer, share)
            self._mlp_of(layer, share.mlp[layer])
        self._head_of(share.vocabulary)

    def keep_only(self, shares: Sequence[RankShare]) -> None:
        """Let go of matrices that no live plan uses."""
        attention = {(layer, share.query[layer]) for share in shares for layer in range(self._config.layers)}
        mlp = {(layer, share.mlp[layer]) for share in shares for layer in range(self._config.layers)}
        self._attention = {key: value for key, value in self._attention.items() if key in attention}
        self._mlp = {key: value for key, value in self._mlp.items() if key in mlp}

    def _whole(self, name: str) -> Tensor:
        return self._placed(self._checkpoint.tensor(name))

    def _placed(self, view: Tensor) -> Tensor:
        return view.to(device=self._device, dtype=self._dtype)

    def _rows(self, name: str, rows: Interval) -> Tensor:
        return self._placed(self._checkpoint.tensor(name)[rows.start : rows.end])

    def _columns(self, name: str, columns: Interval) -> Tensor:
        return self._placed(self._checkpoint.tensor(name)[:, columns.start : columns.end])

    def _attention_of(self, layer: int, share: RankShare) -> _Attention:
        heads, kv = share.query[layer], share.kv[layer]
        found = self._attention.get((layer, heads))
        if found is not None:
            return found
        prefix, dim = f"model.layers.{layer}.self_attn.", self._config.head_dim
        ranges = [("q", heads.scaled(dim)), ("k", kv.scaled(dim)), ("v", kv.scaled(dim))]
        query, key, value = (self._rows(f"{prefix}{part}_proj.weight", rows) for part, rows in ranges)
        biases = [self._rows(f"{prefix}{part}_proj.bias", rows) if self._config.qkv_bias else None for part, rows in ranges]
        output = self._columns(f"{prefix}o_proj.weight", ranges[0][1])
        front = heads.start - kv.start * self._config.group if heads.width else 0
        made = _Attention((query, key, value), (biases[0], biases[1], biases[2]), output, heads.width, kv.width, front)
        self._attention[layer, heads] = made
        return made

    def _mlp_of(self, layer: int, columns: Interval) -> _Mlp:
        found = self._mlp.get((layer, columns))
        if found is not None:
            return found
        prefix = f"model.layers.{layer}.mlp."
        gate, up = (self._rows(f"{prefix}{part}_proj.weight", columns) for part in ("gate", "up"))
        biases = [self._rows(f"{prefix}{part}_proj.bias", columns) if self._config.mlp_bias else None for part in ("gate", "up")]
        made = _Mlp(gate, up, self._columns(f"{prefix}down_proj.weight", columns), *biases)
        self._mlp[layer, columns] = made
        return made

    def _head_of(self, vocabulary: Interval) -> Tensor:
        if self._head is None or self._head[0] != vocabulary:
            self._head = vocabulary, self._placed(self._checkpoint.output_head[vocabulary.start : vocabulary.end])
        return self._head[1]

    # --- arithmetic -------------------------------------------------------------------------------------------------------

    def begin(self, layout: StepLayout, hidden: Tensor) -> None:
        self._layout, self._hidden = layout, hidden
        self._cos, self._sin = layout.cos[:, None].to(self._dtype), layout.sin[:, None].to(self._dtype)

    def attention(self, layer: int) -> Tensor:
        x = self._normed(self._hidden, self._input_norms[layer])
        if len(self._layout.parts) == 1:
            return self._attention_part(layer, self._layout.parts[0], x)
        partial = torch.empty_like(x)
        for part in self._layout.parts:
            partial[part.rows] = self._attention_part(layer, part, x[part.rows])
        return partial

    def _attention_part(self, layer: int, part: Part, x: Tensor) -> Tensor:
        weights = self._attention_of(layer, self._shares[part.version])
        if weights.heads == 0:
            return torch.zeros_like(x)
        tokens, dim, group = x.shape[0], self._config.head_dim, self._config.group
        query, key, value = (linear(x, w, b).view(tokens, -1, dim) for w, b in zip(weights.projections, weights.biases, strict=True))
        if self._config.qk_norm:
            query, key = (self._normed(heads, norm) for heads, norm in zip((query, key), self._head_norms[layer], strict=True))
        cos, sin = self._cos[part.rows], self._sin[part.rows]
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        first, last, whole = weights.front, weights.front + weights.heads, weights.kv_heads * group
        if weights.heads < whole:  # the cut runs through a group: zero queries stand in for the neighbour's
            padded = query.new_zeros((tokens, whole, dim))
            padded[:, first:last] = query
            query = padded
        out = torch.empty_like(query)
        shape = (tokens, weights.kv_heads, group, dim)
        self._kv.attend(layer, part.spans, query.view(shape), key, value, out.view(shape))
        return linear(out.view(tokens, -1)[:, first * dim : last * dim], weights.output)

    def mlp(self, layer: int, columns: Interval) -> Tensor:
        x = self._normed(self._hidden, self._post_norms[layer])
        if columns.width == 0:
            return torch.zeros_like(x)
        weights = self._mlp_of(layer, columns)
        return linear(silu(linear(x, weights.gate, weights.gate_bias)) * linear(x, weights.up, weights.up_bias), weights.down)

    def logits(self, rows: Sequence[int], vocabulary: Interval) -> Tensor:
        return linear(self._normed(self._hidden[rows], self._last_norm), self._head_of(vocabulary)).float()

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, weight.shape, weight, self._config.rms_eps)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in half-split order; heads (tokens, heads, dim), cos and signed sin (tokens, 1, dim)."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)
