"""KV on CPUs: one contiguous block per slot and layer, so that attention reads it in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.torch_tp.config import ModelConfig
from runtime.torch_tp.kv_store import KvFull, Span
from runtime.torch_tp.shares import Interval


@dataclass(slots=True)
class _Slot:
    plan_version: int
    heads: tuple[Interval, ...]
    tokens_max: int
    layers: list[Tensor]
    """Per layer keys and values, shape (2, heads, tokens_max, head_dim)."""
    length: int = 0
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class SlotKv:
    """Implements `KvStore`. Memory is taken from the system as tokens are written (untouched pages cost nothing)."""

    def __init__(self, config: ModelConfig, *, tokens_max: int, slots_max: int, device: torch.device, dtype: torch.dtype) -> None:
        self._head_dim = config.head_dim
        self._tokens_max, self._slots_max = tokens_max, slots_max
        self._device, self._dtype = device, dtype
        self._plans: dict[int, tuple[Interval, ...]] = {}
        self._slots: dict[int, _Slot] = {}

    @property
    def tokens_free(self) -> int:
        """Tokens that can still be reserved."""
        return self._tokens_max - sum(slot.tokens_max for slot in self._slots.values())

    def add_plan(self, version: int, kv: Sequence[Interval]) -> None:
        self._plans[version] = tuple(kv)

    def drop_plan(self, version: int) -> None:
        users = [number for number, slot in self._slots.items() if slot.plan_version == version]
        if users:
            raise ValueError(f"plan version {version} is used by slots {users}; release or move them first")
        self._plans.pop(version, None)

    def allocate(self, slot: int, plan_version: int, tokens_max: int) -> None:
        if slot in self._slots:
            raise ValueError(f"slot {slot} is in use; release it first")
        if plan_version not in self._plans:
            raise ValueError(f"plan version {plan_version} is not live; live: {sorted(self._plans)}")
        if tokens_max < 1:
            raise ValueError(f"slot {slot}: tokens_max={tokens_max} must be at least 1")
        if len(self._slots) >= self._slots_max or tokens_max > self.tokens_free:
            slots_free = self._slots_max - len(self._slots)
            raise KvFull(f"no room for slot {slot} of {tokens_max} tokens: {self.tokens_free} tokens and {slots_free} slots are free")
        heads = self._plans[plan_version]
        layers = [torch.empty((2, h.width, tokens_max, self._head_dim), dtype=self._dtype, device=self._device) for h in heads]
        self._slots[slot] = _Slot(plan_version, heads, tokens_max, layers, pairs=[(layer[0], layer[1]) for layer in layers])

    def grow(self, slot: int, tokens_max: int) -> None:
        held = self._slot(slot)
        more = tokens_max - held.tokens_max
        if more <= 0:
            return
        if more > self.tokens_free:
            raise KvFull(f"no room for slot {slot} to grow from {held.tokens_max} to {tokens_max} tokens: {self.tokens_free} are free")
        for layer, old in enumerate(held.layers):
            new = torch.empty((2, old.shape[1], tokens_max, self._head_dim), dtype=self._dtype, device=self._device)
            new[:, :, : held.length] = old[:, :, : held.length]
            held.layers[layer] = new
        held.pairs = [(layer[0], layer[1]) for layer in held.layers]
        held.tokens_max = tokens_max

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def length(self, slot: int) -> int:
        return self._slot(slot).length

    def plan_version(self, slot: int) -> int:
        return self._slot(slot).plan_version

    def truncate(self, slot: int, tokens: int) -> None:
        held = self._slot(slot)
        if not 0 <= tokens <= held.length:
            raise ValueError(f"slot {slot} holds {held.length} tokens, cannot be truncated to {tokens}")
        held.length = tokens

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        old, new = self._slot(source), self._slot(target)
        if not 0 <= tokens <= min(old.length, new.tokens_max):
            raise ValueError(f"cannot copy {tokens} tokens: slot {source} holds {old.length}, slot {target} has room for {new.tokens_max}")
        for layer, (have, want) in enumerate(zip(old.heads, new.heads, strict=True)):
            common = have.intersection(want)
            if common.width:
                part = old.layers[layer][:, common.start - have.start : common.end - have.start, :tokens]
                new.layers[layer][:, common.start - want.start : common.end - want.start, :tokens] = part
        new.length = tokens

    def move(self, source: int, target: int) -> None:
        held = self._slot(source)
        self.release(target)
        self._slots[target] = held
        del self._slots[source]

    def export(self, slot: int, layer: int, heads: Interval, start: int, end: int) -> Tensor:
        held = self._slot(slot)
        own = self._own(held, slot, layer, heads)
        if not 0 <= start <= end <= held.length:
            raise ValueError(f"slot {slot} holds {held.length} tokens, asked for [{start}, {end})")
        return held.layers[layer][:, own.start : own.end, start:end].clone()

    def import_(self, slot: int, layer: int, heads: Interval, start: int, values: Tensor) -> None:
        held = self._slot(slot)
        own = self._own(held, slot, layer, heads)
        tokens = values.shape[2]
        if start < 0 or start + tokens > held.tokens_max:
            raise ValueError(f"slot {slot} has room for {held.tokens_max} tokens, got [{start}, {start + tokens})")
        held.layers[layer][:, own.start : own.end, start : start + tokens] = values
        held.length = max(held.length, start + tokens)

    def begin(self, spans: Sequence[Span]) -> None:
        for span in spans:
            held = self._slot(span.slot)
            end = span.start + span.tokens
            if span.start > held.length or end > held.tokens_max:
                raise ValueError(f"slot {span.slot} holds {held.length} tokens of at most {held.tokens_max}; got [{span.start}, {end})")

    def attend(self, layer: int, spans: Sequence[Span], query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        for span in spans:
            keys, values = self._slots[span.slot].pairs[layer]
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

    def commit(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._slots[span.slot].length = span.start + span.tokens

    def _slot(self, slot: int) -> _Slot:
        held = self._slots.get(slot)
        if held is None:
            raise ValueError(f"slot {slot} is not allocated; allocated: {sorted(self._slots)}")
        return held

    def _own(self, held: _Slot, slot: int, layer: int, heads: Interval) -> Interval:
        """`heads` counted from this rank's first head."""
        own = held.heads[layer]
        if not own.covers(heads):
            raise ValueError(f"slot {slot}, layer {layer}: holds KV heads [{own.start}, {own.end}), asked for [{heads.start}, {heads.end})")
        return Interval(heads.start - own.start, heads.end - own.start) if heads.width else Interval(0, 0)


def _causal_mask(start: int, end: int, device: torch.device) -> Tensor:
    """(end - start, end): which positions the tokens [start, end) may see."""
    return torch.ones((end - start, end), dtype=torch.bool, device=device).tril(start)
