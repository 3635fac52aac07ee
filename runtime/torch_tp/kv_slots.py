"""KV on CPUs: one contiguous block per slot and layer, so that attention reads it in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.torch_tp import row_kernels
from runtime.torch_tp.config import ModelConfig
from runtime.torch_tp.kv_store import SlotBook, SlotEntry, Span
from runtime.torch_tp.shares import Interval

BLOCK_TOKENS = 128
"""Queries of one block of attention, at most."""
SCORES_MAX = 2**20
"""Scores of one block, at most: 4 MiB of float32, so that they stay in cache."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """layers: keys and values per layer, (2, heads, tokens_max, head_dim). addresses: where each starts, int64 (layers,)."""

    layers: list[Tensor]
    addresses: np.ndarray


class SlotKv(SlotBook[_Blocks]):
    """Implements `KvStore`. `tokens_max` bounds what slots may reserve in all; the system gives memory as tokens are written."""

    def __init__(self, config: ModelConfig, *, tokens_max: int, slots_max: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(tokens_max, slots_max)
        self._head_dim = config.head_dim
        self._device, self._dtype = device, dtype

    def allocate(self, slot: int, plan_version: int, tokens_max: int) -> None:
        heads = self._check_free(slot, plan_version, tokens_max)
        self._slots[slot] = SlotEntry(plan_version, heads, tokens_max, self._blocks(heads, tokens_max))

    def _blocks(self, heads: Sequence[Interval], tokens_max: int) -> _Blocks:
        shapes = [(2, own.width, tokens_max, self._head_dim) for own in heads]
        layers = [torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes]
        return _Blocks(layers, np.array([layer.data_ptr() for layer in layers], dtype=np.int64))

    def grow(self, slot: int, tokens_max: int) -> None:
        entry = self._entry(slot)
        if tokens_max <= entry.tokens_max:
            return
        self._check_tokens(slot, tokens_max - entry.tokens_max)
        wider = self._blocks(entry.heads, tokens_max)
        for new, old in zip(wider.layers, entry.storage.layers, strict=True):
            new[:, :, : entry.length] = old[:, :, : entry.length]
        entry.storage, entry.tokens_max = wider, tokens_max

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        old, new = self._prefix_pair(source, target, tokens)
        for layer, (have, want) in enumerate(zip(old.heads, new.heads, strict=True)):
            common = have.intersection(want)
            if common.width:
                part = old.storage.layers[layer][:, common.start - have.start : common.end - have.start, :tokens]
                new.storage.layers[layer][:, common.start - want.start : common.end - want.start, :tokens] = part
        new.length = tokens

    def move(self, source: int, target: int) -> None:
        entry = self._entry(source)
        if source != target:
            self._slots[target] = entry
            del self._slots[source]

    def export(self, slot: int, layer: int, heads: Interval, start: int, end: int) -> Tensor:
        entry = self._check_held(slot, start, end)
        own = entry.own(slot, layer, heads)
        return entry.storage.layers[layer][:, own.start : own.end, start:end].clone()

    def import_(self, slot: int, layer: int, heads: Interval, start: int, values: Tensor) -> None:
        end = start + values.shape[2]
        entry = self._check_room(slot, start, end)
        own = entry.own(slot, layer, heads)
        entry.storage.layers[layer][:, own.start : own.end, start:end] = values
        entry.length = max(entry.length, end)

    def row_addresses(self, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(addresses (layers, rows), rooms (rows,), positions (rows,)), int64, of every token of these spans, in their order."""
        counts = [span.tokens for span in spans]
        entries = [self._slots[span.slot] for span in spans]
        addresses = np.repeat(np.stack([entry.storage.addresses for entry in entries], axis=1), counts, axis=1)
        rooms = np.repeat(np.array([entry.tokens_max for entry in entries], dtype=np.int64), counts)
        positions = np.concatenate([np.arange(span.start, span.start + span.tokens, dtype=np.int64) for span in spans])
        return addresses, rooms, positions

    def attend(self, layer: int, spans: Sequence[Span], query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        for span in spans:
            keys, values = self._slots[span.slot].storage.layers[layer]
            rows, end = slice(span.row, span.row + span.tokens), span.start + span.tokens
            keys[:, span.start : end] = key[rows].transpose(0, 1)
            values[:, span.start : end] = value[rows].transpose(0, 1)
            if self._dtype == torch.float32:
                attend_in_blocks(query[rows], keys[:, :end], values[:, :end], span.start, out[rows])
            else:
                attend_by_torch(query[rows], keys[:, :end], values[:, :end], span.start, out[rows])


def attend_in_blocks(query: Tensor, keys: Tensor, values: Tensor, start: int, out: Tensor) -> None:
    """Causal attention of one sequence's new tokens, from position `start` on, in float32.

    query, out: (tokens, kv heads, group, head_dim); keys, values: (kv heads, end, head_dim). A block of queries multiplies only the
    keys it may see, the group's queries side by side as rows: half the work of a full square, and no key is repeated.
    """
    tokens, heads, group, dim = query.shape
    block = max(1, min(BLOCK_TOKENS, SCORES_MAX // (heads * group * (start + tokens))))
    bits = np.empty(start + tokens, dtype=np.int32)
    for first in range(0, tokens, block):
        last = min(first + block, tokens)
        end = start + last
        rows = query[first:last].permute(1, 2, 0, 3).reshape(heads, group * (last - first), dim)
        scores = torch.bmm(rows, keys[:, :end].transpose(1, 2))
        row_kernels.causal_softmax(scores.numpy(), last - first, start + first, np.float32(dim**-0.5), bits)
        done = torch.bmm(scores, values[:, :end])
        out[first:last] = done.view(heads, group, last - first, dim).permute(2, 0, 1, 3)


def attend_by_torch(query: Tensor, keys: Tensor, values: Tensor, start: int, out: Tensor) -> None:
    """As `attend_in_blocks`, in any number type. KV heads lie on the batch axis, the group on the head axis with stride 0."""
    tokens, heads, group, dim = query.shape
    shape = (heads, group, keys.shape[1], dim)
    mask = torch.ones((tokens, keys.shape[1]), dtype=torch.bool, device=query.device).tril(start)
    done = scaled_dot_product_attention(
        query.permute(1, 2, 0, 3), keys[:, None].expand(shape), values[:, None].expand(shape), attn_mask=mask
    )
    out[:] = done.permute(2, 0, 1, 3)
