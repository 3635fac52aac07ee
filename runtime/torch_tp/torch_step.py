"""The forward pass in torch operations: many rows on a CPU, any number on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.torch_tp.config import ModelConfig
from runtime.torch_tp.elementwise import Elementwise
from runtime.torch_tp.kv_store import KvStore
from runtime.torch_tp.matrix_product import Product
from runtime.torch_tp.shares import Interval, RankShare
from runtime.torch_tp.step_layout import Part, StepLayout
from runtime.torch_tp.torch_weights import TorchWeights


class TorchStep:
    """Implements `model.Step` on any device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: TorchWeights,
        kv: KvStore,
        shares: Mapping[int, RankShare],
        elementwise: Elementwise,
        product: Product = linear,
    ) -> None:
        self._config, self._weights, self._kv, self._shares = config, weights, kv, shares
        self._elementwise, self._product = elementwise, product

    def begin(self, layout: StepLayout, hidden: Tensor) -> None:
        self._layout, self._hidden = layout, hidden
        self._cos, self._sin = layout.cos.to(hidden), layout.sin.to(hidden)

    def attention(self, layer: int) -> Tensor:
        x = self._normed(self._hidden, self._weights.input_norms[layer])
        if len(self._layout.parts) == 1:
            return self._attention_part(layer, self._layout.parts[0], x)
        partial = torch.empty_like(x)
        for part in self._layout.parts:
            partial[part.rows] = self._attention_part(layer, part, x[part.rows])
        return partial

    def _attention_part(self, layer: int, part: Part, x: Tensor) -> Tensor:
        weights = self._weights.attention(layer, self._shares[part.version])
        if weights.heads == 0:
            return torch.zeros_like(x)
        tokens, dim, group = x.shape[0], self._config.head_dim, self._config.group
        query, key, value = (self._product(x, w, b).view(tokens, -1, dim) for w, b in zip(weights.projections, weights.biases, strict=True))
        if self._config.qk_norm:
            query, key = (self._normed(heads, norm) for heads, norm in zip((query, key), self._weights.head_norms[layer], strict=True))
        cos, sin = self._cos[part.rows], self._sin[part.rows]
        query, key = self._elementwise.rotated(query, cos, sin), self._elementwise.rotated(key, cos, sin)
        first, last, whole = weights.front, weights.front + weights.heads, weights.kv_heads * group
        if weights.heads < whole:  # the cut runs through a group: zero queries stand in for the neighbour's
            padded = query.new_zeros((tokens, whole, dim))
            padded[:, first:last] = query
            query = padded
        out = torch.empty_like(query)
        shape = (tokens, weights.kv_heads, group, dim)
        self._kv.attend(layer, part.spans, query.view(shape), key, value, out.view(shape))
        return self._product(out.view(tokens, -1)[:, first * dim : last * dim], weights.output, None)

    def mlp(self, layer: int, columns: Interval) -> Tensor:
        x = self._normed(self._hidden, self._weights.post_norms[layer])
        if columns.width == 0:
            return torch.zeros_like(x)
        weights = self._weights.mlp(layer, columns)
        gate, up = self._product(x, weights.gate, weights.gate_bias), self._product(x, weights.up, weights.up_bias)
        return self._product(self._elementwise.gated(gate, up), weights.down, None)

    def logits(self, rows: Sequence[int], vocabulary: Interval) -> Tensor:
        return linear(self._normed(self._hidden[rows], self._weights.last_norm), self._weights.head(vocabulary)).float()

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._elementwise.normed(hidden, weight, self._config.rms_eps)
