"""KV on CPUs: one contiguous block per slot and layer, so that attention reads it in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.torch_tp.config import ModelConfig
from runtime.torch_tp.kv_store import SlotBook, SlotEntry, Span
from runtime.torch_tp.shares import Interval


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
            first, last, end = span.row, span.row + span.tokens, span.start + span.tokens
            keys[:, span.start : end] = key[first:last].transpose(0, 1)
            values[:, span.start : end] = value[first:last].transpose(0, 1)
            keys, values = keys[:, :end], values[:, :end]
            if span.tokens == 1:  # the group lies on the query axis: every key is read once for all its queries
                out[first] = scaled_dot_product_attention(query[first : first + 1], keys[None], values[None])[0]
                continue
            # KV heads on the batch axis, the group on the head axis with stride 0: nothing is repeated in memory
            heads, group = query.shape[1:3]
            shape = (heads, group, end, self._head_dim)
            is_whole = span.start == 0
            mask = None if is_whole else _causal_mask(span.start, end, query.device)
            queries = query[first:last].permute(1, 2, 0, 3)
            done = scaled_dot_product_attention(
                queries, keys[:, None].expand(shape), values[:, None].expand(shape), attn_mask=mask, is_causal=is_whole
            )
            out[first:last] = done.permute(2, 0, 1, 3)


def _causal_mask(start: int, end: int, device: torch.device) -> Tensor:
    """(end - start, end): which positions the tokens [start, end) may see."""
    return torch.ones((end - start, end), dtype=torch.bool, device=device).tril(start)
