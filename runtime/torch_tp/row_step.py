"""The forward pass for few rows on a CPU: whole half layers in compiled kernels, on the mapped weights in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from runtime.torch_tp import row_kernels
from runtime.torch_tp.checkpoint import Checkpoint
from runtime.torch_tp.config import ModelConfig
from runtime.torch_tp.kv_slots import SlotKv
from runtime.torch_tp.row_kernels import padded_rows
from runtime.torch_tp.shares import Interval, RankShare
from runtime.torch_tp.step_layout import Part, StepLayout

Array = np.ndarray
_NOTHING = np.empty(0, dtype=np.float32)
CONTEXT_ROOM = 512
"""Scratch for attention scores grows by this many tokens."""


class RowWeights:
    """numpy views of every whole matrix."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.layers = [_LayerArrays(checkpoint, layer) for layer in range(checkpoint.config.layers)]
        self.last_norm = checkpoint.tensor("model.norm.weight").numpy()
        self.head = checkpoint.output_head.numpy()


@lru_cache(maxsize=2)
def row_weights(checkpoint: Checkpoint) -> RowWeights:
    """Made once per open checkpoint: a rank that joins a new group keeps its views."""
    return RowWeights(checkpoint)


class RowStep:
    """The kernels' arguments kept ready, with scratch per row count.

    Implements `model.Step`. What `attention` and `mlp` return is scratch, valid until the next call; serves one thread.
    """

    def __init__(self, config: ModelConfig, weights: RowWeights, kv: SlotKv, shares: Mapping[int, RankShare]) -> None:
        self._config, self._weights, self._kv, self._shares = config, weights, kv, shares
        self._eps = np.float32(config.rms_eps)
        self._scratch: dict[int, _Scratch] = {}
        self._scores = np.empty((padded_rows(self._config.group), 0), dtype=np.float32)
        self._bits = np.empty(self._config.mlp_width, dtype=np.int32)

    def begin(self, layout: StepLayout, hidden: Tensor) -> None:
        """Note a step; `hidden` (rows, hidden) is read anew by each half layer."""
        self._hidden, self._joint = hidden.numpy(), torch.empty_like(hidden) if len(layout.parts) > 1 else None
        cos, sin = layout.cos.numpy(), layout.sin.numpy()
        self._parts = [_PartArrays(part, cos, sin, *self._kv.row_addresses(part.spans)) for part in layout.parts]
        longest = max(int(part.positions.max()) + 1 for part in self._parts)
        if longest > self._scores.shape[1]:
            room = -(-longest // CONTEXT_ROOM) * CONTEXT_ROOM
            self._scores = np.zeros((self._scores.shape[0], room), dtype=np.float32)
            self._bits = np.empty(max(room, self._config.mlp_width), dtype=np.int32)

    def attention(self, layer: int) -> Tensor:
        if self._joint is None:
            return self._attention_part(layer, self._parts[0])
        for part in self._parts:
            self._joint[part.rows] = self._attention_part(layer, part)
        return self._joint

    def _attention_part(self, layer: int, part: _PartArrays) -> Tensor:
        hidden, arrays, share = self._hidden[part.rows], self._weights.layers[layer], self._shares[part.version]
        scratch = self._scratch_for(hidden.shape[0])
        query, kv = share.query[layer], share.kv[layer]
        if query.width == 0:
            return scratch.zeroed(hidden.shape[0])
        row_kernels.rms_normed(hidden, arrays.input_norm, self._eps, scratch.normed)
        row_kernels.attention_part(
            scratch.normed,
            arrays.attention,
            arrays.attention_biases,
            arrays.head_norms,
            (query.start, query.end, kv.start, kv.end),
            self._config.head_dim,
            self._eps,
            part.cos,
            part.sin,
            part.addresses[layer],
            part.rooms,
            part.positions,
            (scratch.queries, scratch.keys, scratch.values, scratch.group_queries, scratch.group_out, self._scores),
            self._bits,
            scratch.partial,
        )
        return scratch.partial_rows(hidden.shape[0])

    def mlp(self, layer: int, columns: Interval) -> Tensor:
        hidden, arrays = self._hidden, self._weights.layers[layer]
        scratch = self._scratch_for(hidden.shape[0])
        if columns.width == 0:
            return scratch.zeroed(hidden.shape[0])
        row_kernels.rms_normed(hidden, arrays.post_norm, self._eps, scratch.normed)
        row_kernels.mlp_part(
            scratch.normed,
            arrays.mlp,
            arrays.mlp_biases,
            columns.start,
            columns.end,
            (scratch.gate, scratch.up),
            self._bits,
            scratch.partial,
        )
        return scratch.partial_rows(hidden.shape[0])

    def logits(self, rows: Sequence[int], vocabulary: Interval) -> Tensor:
        chosen = self._hidden[rows]
        normed = np.empty((padded_rows(len(rows)), self._config.hidden), dtype=np.float32)
        out = np.empty((normed.shape[0], vocabulary.width), dtype=np.float32)
        row_kernels.rms_normed(chosen, self._weights.last_norm, self._eps, normed)
        row_kernels.rows_times(normed, self._weights.head, vocabulary.start, vocabulary.end, 0, self._config.hidden, out, 0)
        return torch.from_numpy(out[: len(rows)])

    def _scratch_for(self, rows: int) -> _Scratch:
        padded = padded_rows(rows)
        if padded not in self._scratch:
            self._scratch[padded] = _Scratch(self._config, padded)
        return self._scratch[padded]


class _PartArrays:
    """One plan's rows of a step, as the attention kernel takes them."""

    def __init__(self, part: Part, cos: Array, sin: Array, addresses: Array, rooms: Array, positions: Array) -> None:
        self.version, self.rows = part.version, part.rows
        self.cos, self.sin = cos[part.rows], sin[part.rows]
        self.addresses, self.rooms, self.positions = addresses, rooms, positions


class _LayerArrays:
    """numpy views of one layer's weights, grouped as the kernels take them."""

    def __init__(self, checkpoint: Checkpoint, layer: int) -> None:
        config, prefix = checkpoint.config, f"model.layers.{layer}."

        def array(name: str, is_there: bool = True) -> Array:
            return checkpoint.tensor(prefix + name).numpy() if is_there else _NOTHING

        self.input_norm, self.post_norm = array("input_layernorm.weight"), array("post_attention_layernorm.weight")
        self.attention = tuple(array(f"self_attn.{part}_proj.weight") for part in "qkvo")
        self.attention_biases = tuple(array(f"self_attn.{part}_proj.bias", config.qkv_bias) for part in "qkv")
        self.head_norms = tuple(array(f"self_attn.{part}_norm.weight", config.qk_norm) for part in "qk")
        self.mlp = tuple(array(f"mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
        self.mlp_biases = tuple(array(f"mlp.{part}_proj.bias", config.mlp_bias) for part in ("gate", "up"))


class _Scratch:
    """Arrays for one padded row count."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        def array(columns: int, count: int = rows) -> Array:
            return np.zeros((count, columns), dtype=np.float32)

        self.normed, self.partial = array(config.hidden), array(config.hidden)
        self._partial = torch.from_numpy(self.partial)
        self.queries = array(config.query_heads * config.head_dim)
        self.keys, self.values = array(config.kv_heads * config.head_dim), array(config.kv_heads * config.head_dim)
        self.group_queries, self.group_out = (array(config.head_dim, padded_rows(config.group)) for _ in range(2))
        self.gate, self.up = array(config.mlp_width), array(config.mlp_width)

    def partial_rows(self, rows: int) -> Tensor:
        return self._partial[:rows]

    def zeroed(self, rows: int) -> Tensor:
        self.partial[:rows] = 0
        return self._partial[:rows]
