"""One rank's part of the forward pass, for whatever ranges its plans give it.

Attention and MLP each end in one all-reduce of a partial sum; a rank of zero width adds zeros. How a half layer is computed is
left to a `Step`: compiled kernels for few rows on a CPU, torch otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from envs.domain.plans import LayerPlans
from runtime.torch_tp.checkpoint import Checkpoint, float32_copy
from runtime.torch_tp.elementwise import KernelElementwise, TorchElementwise
from runtime.torch_tp.graph_step import GraphStep
from runtime.torch_tp.kv_pages import PagedKv
from runtime.torch_tp.kv_slots import SlotKv
from runtime.torch_tp.kv_store import KvStore
from runtime.torch_tp.matrix_product import product_for
from runtime.torch_tp.memory_stall import MemoryStall
from runtime.torch_tp.rope import rope_table
from runtime.torch_tp.row_kernels import ROWS_MAX
from runtime.torch_tp.row_step import RowStep, row_weights
from runtime.torch_tp.shares import Interval, RankShare, share_of
from runtime.torch_tp.step_layout import Slice, StepLayout, halves, lay_out
from runtime.torch_tp.torch_step import TorchStep
from runtime.torch_tp.torch_weights import TorchWeights

if TYPE_CHECKING:
    from runtime.torch_tp.communicators.interface import Communicator, Pending

__all__ = ["LIVE_PLANS_MAX", "Slice", "TpModel"]

LIVE_PLANS_MAX = 2
T = TypeVar("T")


class Step(Protocol):
    """The arithmetic of one step. `attention` and `mlp` give this rank's partial sums, (rows, hidden), to be all-reduced in place."""

    def begin(self, layout: StepLayout, hidden: Tensor) -> None: ...
    def attention(self, layer: int) -> Tensor: ...
    def mlp(self, layer: int, columns: Interval) -> Tensor: ...
    def logits(self, rows: Sequence[int], vocabulary: Interval) -> Tensor: ...


@dataclass(slots=True)
class _Lane:
    """A batch, or half of one, on its way through the layers, with the sum that is under way."""

    layout: StepLayout
    hidden: Tensor
    step: Step
    pending: Pending | None = None
    partial: Tensor | None = None


class TpModel:
    """One rank of a tensor-parallel model.

    checkpoint, communicator: see `checkpoint.py` and `communicators/interface.py`; `rank` is this rank's place in the plans.
    kv_tokens_max, slots_max: room of the KV store over all slots. cuda_graphs: replay recorded decode steps (on GPUs; unverified).
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
        cuda_graphs: bool = False,
    ) -> None:
        self.rank, self.device, self.dtype = rank, torch.device(device), dtype
        on_cpu = self.device.type == "cpu"
        self.checkpoint = float32_copy(checkpoint) if on_cpu and dtype == torch.float32 else checkpoint
        self.config, self.communicator = checkpoint.config, communicator
        room = {"tokens_max": kv_tokens_max, "slots_max": slots_max}
        slots = SlotKv(self.config, **room, device=self.device, dtype=dtype) if on_cpu else None
        self.kv: KvStore = slots or PagedKv(self.config, **room, device=self.device, dtype=dtype)
        self._stall = MemoryStall(self.config, self.device)
        self.memory_stall_s = 0.0
        """Of the last forward: the part of its CPU time outside collectives that it spent waiting for memory, by estimate."""
        self.on_layer: Callable[[int], None] | None = None
        self._rope = rope_table(self.config, min(self.config.context_tokens, kv_tokens_max), self.device)
        self._shares: dict[int, RankShare] = {}
        self._newest = -1
        self._weights = TorchWeights(self.checkpoint, self.device, dtype)
        has_kernels = slots is not None and dtype == torch.float32
        elementwise = KernelElementwise() if has_kernels else TorchElementwise()
        product = product_for(self.device, dtype)
        # two of each: halves of a batch in flight at once must not share scratch
        self._torch_steps = [TorchStep(self.config, self._weights, self.kv, self._shares, elementwise, product) for _ in range(2)]
        self._row_steps: list[RowStep] = []
        if slots is not None and has_kernels:
            self._row_steps = [RowStep(self.config, row_weights(self.checkpoint), slots, self._shares) for _ in range(2)]
        self._graph_steps: list[GraphStep] = []
        if cuda_graphs and isinstance(self.kv, PagedKv):
            self._graph_steps = [GraphStep(self.config, self._weights, self.kv, self._shares) for _ in range(2)]
        self._embedding = self.checkpoint.tensor("model.embed_tokens.weight")

    # --- plans ------------------------------------------------------------------------------------------------------------

    @property
    def plan_versions(self) -> tuple[int, ...]:
        """Live plans, oldest first."""
        return tuple(self._shares)

    @property
    def loaded_bytes(self) -> int:
        """Weight bytes copied to the device so far; on a CPU weights are read where they lie and this stays 0."""
        return self._weights.loaded_bytes

    def share(self, version: int | None = None) -> RankShare:
        """This rank's ranges under a live plan; the newest by default."""
        return self._shares[self._newest if version is None else version]

    def use_plan(self, plan: LayerPlans, *, has_buddies: bool = False) -> None:
        """Add a live plan. MLP and vocabulary follow it from the next step on, attention for slots allocated under it.

        has_buddies: slots under it also keep the KV of a neighbour's heads, which `take_over` can use when that one is lost.

        Raises: ValueError when two plans are live already, or the plan does not fit the model.
        """
        if plan.version in self._shares:
            raise ValueError(f"plan version {plan.version} is live already; give a new version")
        if len(self._shares) >= LIVE_PLANS_MAX:
            raise ValueError(f"plans {list(self._shares)} are live; drop one before using version {plan.version}")
        share = share_of(plan, self.config, self.rank, has_buddies=has_buddies)
        self._weights.prepare(share)
        self.kv.add_plan(plan.version, share.kv)
        self._shares[plan.version] = share
        self._newest = plan.version

    def take_over(self, plan: LayerPlans) -> None:
        """Replace the live plan of this version by one over other ranks, of which this is `self.rank`; slots keep all that they hold.

        Raises: ValueError when its heads need KV that slots of the old one do not keep.
        """
        share, old = share_of(plan, self.config, self.rank), self._shares[plan.version]
        for layer, (needed, kept) in enumerate(zip(share.kv, old.kv, strict=True)):
            if not kept.covers(needed):
                raise ValueError(f"layer {layer}: heads need KV [{needed.start}, {needed.end}), slots keep [{kept.start}, {kept.end})")
        share = RankShare(share.query, old.kv, share.mlp, share.vocabulary)
        self._weights.prepare(share)
        self._shares[plan.version] = share
        self._weights.keep_only(self._shares.values())

    def ready_plan(self, plan: LayerPlans) -> None:
        """Fetch what `use_plan` of this plan will need, so that it costs no time then; steps may go on meanwhile, in another thread."""
        self._weights.prepare(share_of(plan, self.config, self.rank))

    def slide_columns(self, plan: LayerPlans) -> None:
        """Cut MLP and vocabulary like `plan` from the next step on: the newest plan's version and heads, other columns and rows.

        Raises: ValueError when it has another version or other heads, which slots would have to move for.
        """
        share, newest = share_of(plan, self.config, self.rank), self._shares[self._newest]
        if plan.version != self._newest or share.query != newest.query:
            raise ValueError(
                f"plan version {plan.version} differs in version or heads from the newest, {self._newest}; use_plan it instead"
            )
        share = RankShare(share.query, newest.kv, share.mlp, share.vocabulary)
        self._weights.prepare(share)
        self._shares[plan.version] = share
        self._weights.keep_only(self._shares.values())

    def drop_plan(self, version: int) -> None:
        """Forget a plan that no slot uses. Dropping the newest returns MLP and vocabulary to the one before (an aborted switch)."""
        if version not in self._shares:
            raise ValueError(f"plan version {version} is not live; live: {list(self._shares)}")
        self.kv.drop_plan(version)
        del self._shares[version]
        self._newest = next(reversed(self._shares), -1)
        self._weights.keep_only(self._shares.values())

    # --- forward ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, slices: Sequence[Slice], *, all_logits: bool = False, overlap: bool = False) -> Tensor:
        """Run one step. Returns float32 logits, shape (rows, own vocabulary rows).

        Rows are the last positions of the slices that want logits, in the order given; with `all_logits` every position of them.
        overlap: compute one half of the slices while the sums of the other half travel (`Communicator.start_all_reduce`); it pays
        where the link's bandwidth binds. Every rank must ask alike.
        Raises: ValueError for an unknown plan or slot, or a slice that does not continue its slot; whatever the communicator
        raises, in which case no slot has grown and the step may be run again.
        """
        cpu_started_s = time.thread_time()
        self._wait_cpu_s = 0.0
        batches = halves(slices) if overlap and len(slices) > 1 else [slices]
        lanes = [self._lane(index, batch, all_logits) for index, batch in enumerate(batches)]
        share, in_flight = self._shares[self._newest], len(lanes) > 1
        for layer in range(self.config.layers):
            for lane in lanes:
                self._finish(lane)
                self._sum(lane, lane.step.attention(layer), self._weights.output_biases[layer], in_flight)
            for lane in lanes:
                self._finish(lane)
                self._sum(lane, lane.step.mlp(layer, share.mlp[layer]), self._weights.down_biases[layer], in_flight)
            if self.on_layer is not None:
                self.on_layer(layer)
        for lane in lanes:
            self._finish(lane)
        for lane in lanes:
            for part in lane.layout.parts:
                self.kv.commit(part.spans)
        logits = [lane.step.logits(lane.layout.logit_rows, share.vocabulary) for lane in lanes]
        compute_s = time.thread_time() - cpu_started_s - self._wait_cpu_s
        rows = [(lane.layout.rows, own.shape[0]) for lane, own in zip(lanes, logits, strict=True)]
        self.memory_stall_s = self._stall.estimate_s(share, rows, compute_s)
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _lane(self, index: int, slices: Sequence[Slice], all_logits: bool) -> _Lane:
        layout = lay_out(slices, self._shares, self._rope, self.config.vocabulary, all_logits)
        for part in layout.parts:
            self.kv.begin(part.spans)
        hidden = self._embedding[layout.tokens].to(device=self.device, dtype=self.dtype)
        # short prompts go through the BLAS that other float32 implementations use: the first token of a text amplifies rounding (its
        # activations are a hundred times those of others), and there agreement with them is worth more than a few milliseconds
        is_decode = layout.rows == len(slices) <= ROWS_MAX
        steps: Sequence[Step] = self._row_steps if self._row_steps and is_decode else self._torch_steps
        if self._graph_steps and GraphStep.suits(layout):
            steps = self._graph_steps
        steps[index].begin(layout, hidden)
        return _Lane(layout, hidden, steps[index])

    def _sum(self, lane: _Lane, partial: Tensor, bias: Tensor | None, in_flight: bool) -> None:
        """Sum `partial` over the ranks into the lane's hidden states, or begin to. A bias on the sum is added once, by rank 0."""
        if bias is not None and self.rank == 0:
            partial += bias
        if in_flight:
            lane.pending, lane.partial = self._waiting(lambda: self.communicator.start_all_reduce(partial)), partial
        else:
            self._waiting(lambda: self.communicator.all_reduce(partial))
            lane.hidden += partial

    def _finish(self, lane: _Lane) -> None:
        if lane.pending is not None:
            self._waiting(lane.pending.wait)
            assert lane.partial is not None
            lane.hidden += lane.partial
            lane.pending = lane.partial = None

    def _waiting(self, collective: Callable[[], T]) -> T:
        cpu_started_s = time.thread_time()
        result = collective()
        self._wait_cpu_s += time.thread_time() - cpu_started_s
        return result
