"""Decode steps on a GPU as recorded graphs: one launch per half layer instead of some twenty, for batches of one plan.

A graph is recorded once per shape (rows and pages, both rounded up to powers of two) on buffers that stay where they are; a step then
copies its own numbers into them and replays. The all-reduce stays outside, so that any communicator serves. The arithmetic is
`TorchStep`'s. UNVERIFIED: the recording has never run on a GPU; what is recorded is tested on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.torch_tp.config import ModelConfig
from runtime.torch_tp.elementwise import TorchElementwise
from runtime.torch_tp.kv_pages import PAGE_TOKENS, PagedKv
from runtime.torch_tp.kv_store import Span
from runtime.torch_tp.shares import Interval, RankShare
from runtime.torch_tp.step_layout import Part, StepLayout
from runtime.torch_tp.torch_step import TorchStep
from runtime.torch_tp.torch_weights import TorchWeights

ROWS_MAX = 64
RUNS_MAX = 24
WARM_UPS = 3
"""Before a recording: libraries must have chosen their kernels and workspaces, which they may not do while it runs."""

Replay = Callable[[], None]
Recorder = Callable[[Replay], Replay]


class CudaRecorder:
    """Records what a function launches; all graphs of one recorder draw on one pool of memory, since they never run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, act: Replay) -> Replay:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                act()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread that copies KV or loads weights meanwhile is none of the recording's business
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            act()
        graph.replay()  # recording computes nothing
        return graph.replay


def direct(act: Replay) -> Replay:
    """In place of a recorder: do it, now and each time."""
    act()
    return act


class GraphStep:
    """Implements `model.Step` for steps that `suits` accepts. What `attention` and `mlp` return is overwritten by the next call."""

    def __init__(
        self, config: ModelConfig, weights: TorchWeights, kv: PagedKv, shares: Mapping[int, RankShare], record: Recorder | None = None
    ) -> None:
        self._config, self._weights, self._kv, self._shares = config, weights, kv, shares
        self._record = record if record is not None else CudaRecorder()
        self._runs: dict[tuple[int, int, int], _Run] = {}

    @staticmethod
    def suits(layout: StepLayout) -> bool:
        """One plan, one token per sequence, not too many."""
        return len(layout.parts) == 1 and layout.rows == len(layout.parts[0].spans) <= ROWS_MAX

    def begin(self, layout: StepLayout, hidden: Tensor) -> None:
        part = layout.parts[0]
        self._hidden, self._rows = hidden, layout.rows
        pages = 1 + max(span.start for span in part.spans) // PAGE_TOKENS
        key = (part.version, _rounded(layout.rows), _rounded(pages))
        run = self._runs.pop(key, None)
        if run is None or not run.is_valid(self._shares[part.version], self._kv):
            run = _Run(key, self._shares, self._config, self._weights, self._kv, hidden, self._record)
        self._runs[key] = run  # at the end: the first is the one not used for longest
        while len(self._runs) > RUNS_MAX:
            del self._runs[next(iter(self._runs))]
        self._run = run
        run.fill(layout, part.spans)

    def attention(self, layer: int) -> Tensor:
        return self._run.replayed(("attention", layer, None), self._hidden)

    def mlp(self, layer: int, columns: Interval) -> Tensor:
        return self._run.replayed(("mlp", layer, columns), self._hidden)

    def logits(self, rows: Sequence[int], vocabulary: Interval) -> Tensor:
        return self._run.logits(self._hidden, rows, vocabulary)


class _Run:
    """Buffers of one shape and what was recorded on them. Rows beyond the step's own compute on page 0, which nobody reads."""

    def __init__(
        self,
        key: tuple[int, int, int],
        shares: Mapping[int, RankShare],
        config: ModelConfig,
        weights: TorchWeights,
        kv: PagedKv,
        like: Tensor,
        record: Recorder,
    ) -> None:
        version, rows, pages = key
        self._weights, self._share, self._record = weights, shares[version], record
        self._used = like.shape[0]
        device = like.device
        self._static_kv = _StaticPages(kv, [own.width for own in self._share.kv], rows, pages, device)
        self._hidden, self._partial = (like.new_zeros((rows, config.hidden)) for _ in range(2))
        self._cos, self._sin = (like.new_zeros((rows, config.head_dim)) for _ in range(2))
        spans = tuple(Span(row, row, 1, 0) for row in range(rows))
        layout = StepLayout(torch.zeros(rows, dtype=torch.int64), (Part(version, slice(0, rows), spans),), self._cos, self._sin, [])
        self._step = TorchStep(config, weights, self._static_kv, shares, TorchElementwise())
        self._step.begin(layout, self._hidden)
        self._replays: dict[tuple[str, int, Interval | None], Replay] = {}
        self._held: list[object] = []  # matrices that recordings read by address: they must outlive their plan

    def is_valid(self, share: RankShare, kv: PagedKv) -> bool:
        """Whether the ranges and the pool that were recorded are still those in use."""
        return self._share.query == share.query and self._static_kv.pool_address == kv.pool.data_ptr()

    def fill(self, layout: StepLayout, spans: Sequence[Span]) -> None:
        """This step's rotary rows, positions and page tables."""
        self._used = layout.rows
        self._cos[: layout.rows].copy_(layout.cos)
        self._sin[: layout.rows].copy_(layout.sin)
        self._static_kv.fill(spans)

    def replayed(self, what: tuple[str, int, Interval | None], hidden: Tensor) -> Tensor:
        """The partial sum of a half layer for the rows of `hidden`; recorded where it is new."""
        self._hidden[: self._used].copy_(hidden)
        if what in self._replays:
            self._replays[what]()
        else:
            _, layer, columns = what
            self._held.append(self._weights.attention(layer, self._share) if columns is None else self._weights.mlp(layer, columns))
            self._replays[what] = self._record(self._act(*what))
        return self._partial[: self._used]

    def _act(self, half: str, layer: int, columns: Interval | None) -> Replay:
        def act() -> None:
            self._partial.copy_(self._step.attention(layer) if columns is None else self._step.mlp(layer, columns))

        return act

    def logits(self, hidden: Tensor, rows: Sequence[int], vocabulary: Interval) -> Tensor:
        self._hidden[: self._used].copy_(hidden)
        return self._step.logits(rows, vocabulary)


class _StaticPages:
    """The part of a KV store that a recorded step asks for, over tables that stay where they are."""

    def __init__(self, kv: PagedKv, heads: Sequence[int], rows: int, pages: int, device: torch.device) -> None:
        self._kv, self._pool, self._pages = kv, kv.pool, pages
        self.pool_address = kv.pool.data_ptr()
        self._tables = [torch.zeros((rows, count, pages), dtype=torch.int64, device=device) for count in heads]
        self._copied: list[Tensor | None] = [None] * len(heads)
        self._page_of_row, self._offset_of_row = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        # rows that belong to nobody see one token, since attention to nothing is no number
        self._visible = torch.zeros((rows, 1, 1, pages * PAGE_TOKENS), dtype=torch.bool, device=device)
        self._visible[..., 0] = True
        self._places = torch.arange(pages * PAGE_TOKENS, device=device)

    def fill(self, spans: Sequence[Span]) -> None:
        count = len(spans)
        positions = torch.tensor([span.start for span in spans]).to(self._places.device)
        self._page_of_row[:count] = positions // PAGE_TOKENS
        self._offset_of_row[:count] = positions % PAGE_TOKENS
        self._page_of_row[count:] = 0
        self._visible[:count, 0, 0] = self._places <= positions[:, None]
        for layer, table in enumerate(self._tables):
            current = self._kv.joint_tables(spans, self._pages, layer)
            if self._copied[layer] is not current:  # the store makes another one whenever a slot changes
                table.zero_()
                table[:count].copy_(current)
                self._copied[layer] = current

    def attend(self, layer: int, spans: Sequence[Span], query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """As `PagedKv.attend`, one token per row. query, out: (rows, KV heads, group, dim); key, value: (rows, KV heads, dim)."""
        tables = self._tables[layer]
        rows, heads = tables.shape[:2]
        pages = tables.gather(2, self._page_of_row.view(rows, 1, 1).expand(rows, heads, 1)).squeeze(2)
        self._pool[pages, :, self._offset_of_row[:, None].expand(rows, heads)] = torch.stack([key, value], dim=2)
        held = self._pool[tables].permute(3, 0, 1, 2, 4, 5).reshape(2, rows, heads, -1, query.shape[-1])
        out.copy_(scaled_dot_product_attention(query, held[0], held[1], attn_mask=self._visible))


def _rounded(count: int) -> int:
    """Up to a power of two."""
    return 1 << (count - 1).bit_length()
