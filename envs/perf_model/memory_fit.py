"""What a split plan costs in memory: weights, KV and workspace bytes of every rank, and what still fits.

Knows bytes only. How fast a plan is stands in `envs.decision.split_planner`, which builds on these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from envs.domain.plans import SplitPlan, TpGroup
from envs.domain.specs import NUMBER_BYTES, GpuSpec, ModelSpec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ACTIVATION_NUMBER_BYTES = 2.0
LOGIT_NUMBER_BYTES = 4.0
UNBOUNDED_TOKENS = int(np.iinfo(np.int64).max)


class InfeasibleSplit(ValueError):
    """No split of this model over these ranks exists; the message carries the numbers."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """What every rank holds beyond its share, on each side of its range, so that boundaries can slide for free."""

    query_heads: int = 0
    mlp_blocks: int = 0
    vocabulary_rows: int = 0

    def __post_init__(self) -> None:
        if min(self.query_heads, self.mlp_blocks, self.vocabulary_rows) < 0:
            raise ValueError(f"Overlap: widths {self} must be >= 0")


@dataclass(frozen=True, slots=True)
class StepRoom:
    """The largest step that workspace is kept for: its tokens, and the sequences sampled in it."""

    step_tokens: int = 2048
    sequences: int = 256

    def __post_init__(self) -> None:
        if min(self.step_tokens, self.sequences) < 1:
            raise ValueError(f"StepRoom: step_tokens={self.step_tokens} and sequences={self.sequences} must be at least 1")


NO_OVERLAP = Overlap()
DEFAULT_ROOM = StepRoom()


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes on a rank = constant + the sum over units it holds. A model's memory is linear in these counts."""

    constant: float
    per_query_head: float
    per_kv_head: float
    per_mlp_column: float
    per_vocabulary_row: float


def weight_unit_bytes(model: ModelSpec) -> UnitBytes:
    """Weight bytes per unit; the constant holds the replicated norms and, with experts, the routers.

    Q and O follow a query head, K and V a KV head, gate, up and down an MLP column (of every expert), embedding and
    output head a vocabulary row (once if tied).
    """
    number = model.weight_number_bytes
    head = 2.0 * model.layers * model.hidden * model.head_dim * number
    replicated = (2 * model.layers + 1) * model.hidden + model.layers * model.hidden * model.experts
    return UnitBytes(
        constant=replicated * number,
        per_query_head=head,
        per_kv_head=head,
        per_mlp_column=model.layers * model.mlp_numbers_per_column * number,
        per_vocabulary_row=model.hidden * (1 if model.tied_embeddings else 2) * number,
    )


def workspace_unit_bytes(model: ModelSpec, room: StepRoom = DEFAULT_ROOM) -> UnitBytes:
    """Activation, logit and all-reduce workspace per unit, for the largest step.

    Constant: residual, normed and layer output, and a send and a receive buffer of the all-reduce (5 x tokens x hidden).
    Activations are reused from layer to layer, so one layer counts; logits are kept in fp32.
    """
    tokens_bytes = room.step_tokens * ACTIVATION_NUMBER_BYTES
    return UnitBytes(
        constant=5.0 * tokens_bytes * model.hidden,
        per_query_head=2.0 * tokens_bytes * model.head_dim,
        per_kv_head=2.0 * tokens_bytes * model.head_dim,
        per_mlp_column=2.0 * tokens_bytes * max(1, model.experts_active),
        per_vocabulary_row=LOGIT_NUMBER_BYTES * room.sequences,
    )


def total_unit_bytes(model: ModelSpec, kv_tokens: float = 0.0, room: StepRoom = DEFAULT_ROOM) -> UnitBytes:
    """Weights + workspace + KV of `kv_tokens` tokens, per unit."""
    weights, work = weight_unit_bytes(model), workspace_unit_bytes(model, room)
    return UnitBytes(
        weights.constant + work.constant,
        weights.per_query_head + work.per_query_head,
        weights.per_kv_head + work.per_kv_head + kv_tokens * kv_bytes_per_token_per_head(model),
        weights.per_mlp_column + work.per_mlp_column,
        weights.per_vocabulary_row + work.per_vocabulary_row,
    )


def kv_bytes_per_token_per_head(model: ModelSpec) -> float:
    """Key and value bytes of one token in one KV head, over all layers."""
    return 2.0 * model.layers * model.head_dim * NUMBER_BYTES[model.kv_dtype]


def unit_ranges(widths: Sequence[int], overlap: int = 0) -> IntArray:
    """Half-open unit range per rank, shape (ranks, 2), widened by `overlap` on each side but not past the ends."""
    ends = np.cumsum(np.asarray(widths, dtype=np.int64))
    starts = ends - np.asarray(widths, dtype=np.int64)
    return np.stack([np.maximum(starts - overlap, 0), np.minimum(ends + overlap, ends[-1])], axis=1)


def kv_head_ranges(model: ModelSpec, query_ranges: IntArray) -> IntArray:
    """KV heads behind query-head ranges, shape (ranks, 2). A KV head that a cut divides is in both neighbours' ranges."""
    per_group = model.query_heads // model.kv_heads
    starts, ends = query_ranges[:, 0], query_ranges[:, 1]
    is_empty = ends <= starts
    first = starts // per_group
    return np.stack([first, np.where(is_empty, first, -(-ends // per_group))], axis=1)


def _unit_counts(model: ModelSpec, plan: SplitPlan, overlap: Overlap) -> IntArray:
    """Units held per rank, shape (4, ranks): query heads, KV heads, MLP columns, vocabulary rows."""
    plan.check_covers(model)
    heads = unit_ranges(plan.query_heads, overlap.query_heads)
    columns = unit_ranges(plan.mlp_blocks, overlap.mlp_blocks) * plan.mlp_block
    rows = unit_ranges(plan.vocabulary_rows, overlap.vocabulary_rows)
    return np.stack([np.diff(part, axis=1)[:, 0] for part in (heads, kv_head_ranges(model, heads), columns, rows)])


def _bytes(units: UnitBytes, counts: IntArray) -> FloatArray:
    per_unit = np.array([units.per_query_head, units.per_kv_head, units.per_mlp_column, units.per_vocabulary_row])
    return np.asarray(units.constant + per_unit @ counts, dtype=np.float64)


def weight_bytes(model: ModelSpec, plan: SplitPlan, overlap: Overlap = NO_OVERLAP) -> FloatArray:
    """Weight bytes per rank, shape (ranks,); the sum exceeds the model's where KV heads, norms or overlaps are held twice.

    Raises: ValueError when the plan does not cover the model.
    """
    return _bytes(weight_unit_bytes(model), _unit_counts(model, plan, overlap))


def workspace_bytes(model: ModelSpec, plan: SplitPlan, room: StepRoom = DEFAULT_ROOM, overlap: Overlap = NO_OVERLAP) -> FloatArray:
    """Activation, logit and all-reduce workspace bytes per rank, shape (ranks,)."""
    return _bytes(workspace_unit_bytes(model, room), _unit_counts(model, plan, overlap))


def workspace_floor_bytes(model: ModelSpec, ranks: int, room: StepRoom = DEFAULT_ROOM) -> float:
    """Least workspace bytes over all of `ranks` ranks: what each needs in any case, and every unit once."""
    counts = np.array([model.query_heads, model.kv_heads, model.mlp_width, model.vocabulary], dtype=np.int64)
    units = workspace_unit_bytes(model, room)
    return float(_bytes(units, counts[:, None])[0]) + (ranks - 1) * units.constant


def kv_bytes_per_token(model: ModelSpec, plan: SplitPlan) -> FloatArray:
    """KV bytes of one token per rank, shape (ranks,). Overlap does not count: a request's KV lies in one head range."""
    counts = _unit_counts(model, plan, NO_OVERLAP)[1]
    return np.asarray(counts * kv_bytes_per_token_per_head(model), dtype=np.float64)


def usable_bytes(group: TpGroup, memory_fraction: float = 0.9) -> FloatArray:
    """Memory per rank that may be used, shape (ranks,). Raises: ValueError for a fraction outside (0, 1]."""
    if not 0.0 < memory_fraction <= 1.0:
        raise ValueError(f"memory_fraction={memory_fraction} must be in (0, 1]; give e.g. 0.9")
    return np.array([place.gpu.memory_bytes for place in group.ranks], dtype=np.float64) * memory_fraction


def kv_tokens_max(
    group: TpGroup,
    plan: SplitPlan,
    memory_fraction: float = 0.9,
    overlap: Overlap = NO_OVERLAP,
    room: StepRoom = DEFAULT_ROOM,
) -> tuple[IntArray, int]:
    """Tokens whose KV fits beside weights and workspace: per rank, shape (ranks,), and the group's minimum.

    A rank without KV heads has UNBOUNDED_TOKENS, unless even its weights do not fit: then 0, and the group's is 0.
    Raises: ValueError when plan and group differ in ranks or the plan does not cover the model.
    """
    if plan.ranks != len(group.ranks):
        raise ValueError(f"plan has {plan.ranks} ranks, group {group.name!r} has {len(group.ranks)}; plan for this group")
    left = usable_bytes(group, memory_fraction) - weight_bytes(group.model, plan, overlap)
    left -= workspace_bytes(group.model, plan, room, overlap)
    per_token = kv_bytes_per_token(group.model, plan)
    tokens = np.full(plan.ranks, UNBOUNDED_TOKENS, dtype=np.int64)
    holds_kv = per_token > 0
    tokens[holds_kv] = np.floor(np.maximum(left[holds_kv], 0.0) / per_token[holds_kv]).astype(np.int64)
    tokens[left < 0] = 0
    return tokens, int(tokens.min())


def fits(
    group: TpGroup,
    plan: SplitPlan,
    request_tokens: int = 1,
    memory_fraction: float = 0.9,
    overlap: Overlap = NO_OVERLAP,
    room: StepRoom = DEFAULT_ROOM,
) -> bool:
    """Whether weights, workspace and the KV of `request_tokens` tokens fit on every rank."""
    return kv_tokens_max(group, plan, memory_fraction, overlap, room)[1] >= max(1, request_tokens)


def apportion(units: int, shares: Sequence[float] | FloatArray) -> tuple[int, ...]:
    """Integer widths that sum to `units`, by largest remainder; ties go to the lower rank.

    Raises: ValueError unless shares are >= 0, finite and not all zero.
    """
    weights = np.asarray(shares, dtype=np.float64)
    if weights.size == 0 or not np.isfinite(weights).all() or weights.min() < 0 or weights.sum() <= 0:
        raise ValueError(f"apportion: shares={weights.tolist()} must be finite, >= 0 and not all zero")
    exact = units * (weights / weights.sum())
    widths = np.floor(exact).astype(np.int64)
    order = np.argsort(widths - exact, kind="stable")
    widths[order[: units - int(widths.sum())]] += 1
    return tuple(int(width) for width in widths)


def default_mlp_block(model: ModelSpec) -> int:
    """Columns per block: a power of two that divides the MLP and leaves at least 64 blocks, at most 128 columns (a GEMM tile).

    A width without such a divisor gets the smallest divisor that leaves at most 1,024 blocks, so that planning stays fast.
    """
    block = 1
    while block < 128 and model.mlp_width % (2 * block) == 0 and model.mlp_width // (2 * block) >= 64:
        block *= 2
    if model.mlp_width // block <= 1024:
        return block
    divisors = (d for d in range(block, model.mlp_width + 1) if model.mlp_width % d == 0)
    return next((d for d in divisors if model.mlp_width // d <= 1024 and d < model.mlp_width), block)


def proportional_plan(model: ModelSpec, shares: Sequence[float] | FloatArray, mlp_block: int | None = None, version: int = 0) -> SplitPlan:
    """Every cut in the same proportions, by largest remainder. Memory is not looked at."""
    block = default_mlp_block(model) if mlp_block is None else mlp_block
    if block < 1 or model.mlp_width % block:
        raise ValueError(f"mlp_block={block} does not divide mlp_width={model.mlp_width} of {model.name!r}; give a divisor")
    return SplitPlan(
        apportion(model.query_heads, shares),
        apportion(model.mlp_width // block, shares),
        apportion(model.vocabulary, shares),
        mlp_block=block,
        version=version,
    )


def fill_shares(group: TpGroup, kv_tokens: float = 0.0, memory_fraction: float = 0.9, room: StepRoom = DEFAULT_ROOM) -> FloatArray:
    """Largest share of the model (weights, workspace and KV of `kv_tokens`) each rank can hold, shape (ranks,).

    They sum to at least 1 where the model fits, up to rounding to whole heads.
    """
    model = group.model
    units = total_unit_bytes(model, kv_tokens, room)
    counts = np.array([model.query_heads, model.kv_heads, model.mlp_width, model.vocabulary], dtype=np.int64)
    divisible = float(_bytes(units, counts[:, None])[0]) - units.constant
    return np.maximum(usable_bytes(group, memory_fraction) - units.constant, 0.0) / divisible


def smallest_subset(
    group: TpGroup,
    request_tokens: int = 2048,
    memory_fraction: float = 0.9,
    room: StepRoom = DEFAULT_ROOM,
    bytes_per_s: FloatArray | None = None,
) -> tuple[int, ...]:
    """Indices of the fewest ranks that hold the model and `request_tokens` of KV; among equals the largest total bandwidth.

    `bytes_per_s`, shape (ranks,), replaces the datasheet's bandwidth; a rank with 0 there (a lost one) is left out.
    Source: the retreat of DESIGN section 4. Raises: InfeasibleSplit when not even all ranks hold it.
    """
    speed = np.array([place.gpu.memory_bytes_per_s for place in group.ranks]) if bytes_per_s is None else bytes_per_s
    room_share = fill_shares(group, request_tokens, memory_fraction, room)
    alive = [index for index in range(len(group.ranks)) if speed[index] > 0]
    for size in range(1, len(alive) + 1):
        subsets = _distinct_subsets(group, alive, size, speed)
        for subset in sorted(subsets, key=lambda members: (-float(speed[list(members)].sum()), members)):
            shares = room_share[list(subset)]
            if shares.sum() < 1.0 or size > group.model.query_heads:
                continue
            part = replace(group, ranks=tuple(group.ranks[index] for index in subset))
            if fits(part, proportional_plan(group.model, shares), request_tokens, memory_fraction, room=room):
                return subset
    have = usable_bytes(group, memory_fraction)[alive].sum()
    need = group.model.weight_bytes + request_tokens * group.model.kv_bytes_per_token
    raise InfeasibleSplit(
        f"{group.model.name!r} with {request_tokens} tokens of KV needs {need:.4g} bytes and workspace; the {len(alive)} live "
        f"ranks of group {group.name!r} offer {have:.4g}; add ranks, quantise the weights or shorten the context"
    )


def _distinct_subsets(group: TpGroup, alive: list[int], size: int, speed: FloatArray) -> Iterator[tuple[int, ...]]:
    """Subsets of ranks, one of each multiset of (GPU, speed): without it 16 equal ranks would give 12,870 twins."""
    seen: set[tuple[tuple[GpuSpec, float], ...]] = set()
    for subset in combinations(alive, size):
        key = tuple(sorted(((group.ranks[i].gpu, float(speed[i])) for i in subset), key=lambda kind: (kind[0].name, kind[1])))
        if key not in seen:
            seen.add(key)
            yield subset
