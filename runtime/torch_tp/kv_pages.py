"""KV on GPUs: one pool of pages, each of one KV head and a few tokens, so that memory fits any mix of plans and lengths.

A page knows no layer, plan or slot; a slot's table says which pages hold its heads. So two plans with unlike head ranges, layer by
layer, draw on the same pool, and a re-split leaves no memory stranded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from runtime.torch_tp.config import ModelConfig
from runtime.torch_tp.kv_store import KvFull, SlotBook, SlotEntry, Span
from runtime.torch_tp.shares import Interval

PAGE_TOKENS = 16
BATCHES_KEPT = 4
"""Index tensors of a step are kept for its parts: one per live plan and half batch."""


@dataclass(frozen=True, slots=True)
class _Tables:
    """pages: all page numbers of a slot. layers: the same as int64 (heads, pages) per layer, on the device."""

    pages: list[int]
    layers: list[Tensor]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Index tensors of the spans of a step, made once for all layers. `chunk` is the longest span, `context` the longest whole."""

    span_of_row: Tensor
    page_of_row: Tensor
    """(rows,): which column of its span's table a new token goes to, and at which place within the page."""
    offset_of_row: Tensor
    query_rows: Tensor
    """(spans, chunk): row of each query; padding repeats the span's first row."""
    is_query: Tensor
    visible: Tensor
    """(spans, chunk, context rounded up to pages)."""
    pages: int


class PagedKv(SlotBook[_Tables]):
    """Implements `KvStore`. The pool holds `tokens_max` tokens of the KV heads of this rank's widest plan so far."""

    def __init__(self, config: ModelConfig, *, tokens_max: int, slots_max: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(tokens_max, slots_max)
        self._device = device
        self._pool = torch.zeros((1, 2, PAGE_TOKENS, config.head_dim), dtype=dtype, device=device)
        self._free: list[int] = []
        self._batches: dict[tuple[Span, ...], _Batch] = {}
        self._joint_tables: dict[tuple[tuple[int, ...], int, int], Tensor] = {}

    @property
    def pages_free(self) -> int:
        return len(self._free)

    @property
    def pool(self) -> Tensor:
        """(pages, 2, tokens of a page, head_dim); another tensor once a wider plan has been added."""
        return self._pool

    def add_plan(self, version: int, kv: Sequence[Interval]) -> None:
        super().add_plan(version, kv)
        columns = _columns(self._tokens_max) + self._slots_max  # a slot's last page may be partly empty
        missing = 1 + columns * sum(own.width for own in kv) - self._pool.shape[0]  # page 0 stands for padding
        if missing > 0:
            self._free += range(self._pool.shape[0], self._pool.shape[0] + missing)
            self._pool = torch.cat([self._pool, self._pool.new_zeros((missing, *self._pool.shape[1:]))])

    def allocate(self, slot: int, plan_version: int, tokens_max: int) -> None:
        heads = self._check_free(slot, plan_version, tokens_max)
        self._slots[slot] = SlotEntry(plan_version, heads, tokens_max, self._take(slot, heads, _columns(tokens_max)))
        self._joint_tables.clear()

    def _take(self, slot: int, heads: Sequence[Interval], columns: int) -> _Tables:
        counts = [own.width * columns for own in heads]
        if sum(counts) > len(self._free):
            raise KvFull(f"no room for slot {slot}: {sum(counts)} pages wanted, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(sum(counts))]
        parts = torch.tensor(pages, dtype=torch.int64, device=self._device).split(counts)
        return _Tables(pages, [part.view(own.width, columns) for part, own in zip(parts, heads, strict=True)])

    def grow(self, slot: int, tokens_max: int) -> None:
        entry = self._entry(slot)
        if tokens_max <= entry.tokens_max:
            return
        self._check_tokens(slot, tokens_max - entry.tokens_max)
        more = self._take(slot, entry.heads, _columns(tokens_max) - _columns(entry.tokens_max))
        layers = [torch.cat(pair, dim=1) for pair in zip(entry.storage.layers, more.layers, strict=True)]
        entry.storage, entry.tokens_max = _Tables(entry.storage.pages + more.pages, layers), tokens_max
        self._joint_tables.clear()

    def release(self, slot: int) -> None:
        entry = self._slots.pop(slot, None)
        if entry is not None:
            self._free += entry.storage.pages
            self._joint_tables.clear()

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        old, new = self._prefix_pair(source, target, tokens)
        columns = _columns(tokens)  # whole pages: what follows the prefix on the last one is never read
        for layer, (have, want) in enumerate(zip(old.heads, new.heads, strict=True)):
            common = have.intersection(want)
            if common.width and columns:
                origin = old.storage.layers[layer][common.start - have.start : common.end - have.start, :columns]
                goal = new.storage.layers[layer][common.start - want.start : common.end - want.start, :columns]
                self._pool[goal] = self._pool[origin]
        new.length = tokens

    def move(self, source: int, target: int) -> None:
        entry = self._entry(source)
        if source != target:
            self.release(target)
            self._slots[target] = entry
            del self._slots[source]
            self._joint_tables.clear()

    def export(self, slot: int, layer: int, heads: Interval, start: int, end: int) -> Tensor:
        entry = self._check_held(slot, start, end)
        pages, offsets = self._places(entry, layer, entry.own(slot, layer, heads), start, end)
        return self._pool[pages, :, offsets].permute(2, 0, 1, 3).contiguous()

    def import_(self, slot: int, layer: int, heads: Interval, start: int, values: Tensor) -> None:
        end = start + values.shape[2]
        entry = self._check_room(slot, start, end)
        pages, offsets = self._places(entry, layer, entry.own(slot, layer, heads), start, end)
        self._pool[pages, :, offsets] = values.to(self._pool).permute(1, 2, 0, 3)
        entry.length = max(entry.length, end)

    def _places(self, entry: SlotEntry[_Tables], layer: int, own: Interval, start: int, end: int) -> tuple[Tensor, Tensor]:
        """(pages, offsets within them), each (heads, tokens)."""
        positions = torch.arange(start, end, device=self._device)
        pages = entry.storage.layers[layer][own.start : own.end, positions // PAGE_TOKENS]
        return pages, (positions % PAGE_TOKENS).expand(pages.shape)

    # --- attention --------------------------------------------------------------------------------------------------------

    def begin(self, spans: Sequence[Span]) -> None:
        super().begin(spans)
        while len(self._batches) >= BATCHES_KEPT:
            del self._batches[next(iter(self._batches))]
        self._batches[tuple(spans)] = self._batch(spans)

    def _batch(self, spans: Sequence[Span]) -> _Batch:
        lengths, starts, rows = (torch.tensor([getattr(span, name) for span in spans])[:, None] for name in ("tokens", "start", "row"))
        columns = _columns(int((starts + lengths).max()))
        step = torch.arange(int(lengths.max()))
        is_query = step < lengths
        inside = torch.where(is_query, step, 0)
        positions = (starts + inside)[is_query]
        device = self._device
        return _Batch(
            span_of_row=torch.repeat_interleave(torch.arange(len(spans)), lengths[:, 0]).to(device),
            page_of_row=(positions // PAGE_TOKENS).to(device),
            offset_of_row=(positions % PAGE_TOKENS).to(device),
            query_rows=(rows + inside).to(device),
            is_query=is_query.to(device),
            visible=(torch.arange(columns * PAGE_TOKENS) <= (starts + inside)[:, :, None]).to(device),
            pages=columns,
        )

    def joint_tables(self, spans: Sequence[Span], columns: int, layer: int) -> Tensor:
        """(spans, heads, columns): tables side by side, the same tensor until a slot changes. Padding is page 0, which the mask hides."""
        key = (tuple(span.slot for span in spans), columns, layer)
        if key not in self._joint_tables:
            tables = [self._slots[slot].storage.layers[layer][:, :columns] for slot in key[0]]
            self._joint_tables[key] = torch.stack([pad(table, (0, columns - table.shape[1])) for table in tables])
        return self._joint_tables[key]

    def attend(self, layer: int, spans: Sequence[Span], query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        batch = self._batches[tuple(spans)]
        tables = self.joint_tables(spans, batch.pages, layer)
        pages = tables[batch.span_of_row, :, batch.page_of_row]  # (rows, heads)
        self._pool[pages, :, batch.offset_of_row[:, None].expand(pages.shape)] = torch.stack([key, value], dim=2)
        heads, group, dim = query.shape[1:]
        count, chunk = batch.query_rows.shape
        held = self._pool[tables].permute(3, 0, 1, 2, 4, 5).reshape(2, count, heads, -1, dim)
        # the group beside the chunk on the query axis: keys are read once for all queries of a KV head
        queries = query[batch.query_rows].permute(0, 2, 3, 1, 4).reshape(count, heads, group * chunk, dim)
        done = scaled_dot_product_attention(queries, held[0], held[1], attn_mask=batch.visible[:, None].repeat(1, 1, group, 1))
        done = done.view(count, heads, group, chunk, dim).permute(0, 3, 1, 2, 4)
        out[batch.query_rows[batch.is_query]] = done[batch.is_query]


def _columns(tokens: int) -> int:
    """Pages that hold this many tokens of one head."""
    return -(-tokens // PAGE_TOKENS)
