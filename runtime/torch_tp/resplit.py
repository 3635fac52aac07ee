"""Changing the split of a running group: what must move, whether it pays, and the order of acts. The controller's side; no torch.

Weights are views, so a plan costs no weight byte. Requests keep the head ranges they started with; at most two plans are alive, and
before a third is used the slots of the oldest move their KV to the newer one: copied ahead while steps go on, brought up to date at
the switch. Until a switch nothing has changed, and a rank lost meanwhile ends the attempt. The ranks' side is in `kv_mover`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from envs.decision.move_prices import CopyPrice
from envs.domain.plans import LayerPlans
from envs.domain.specs import NUMBER_BYTES, ModelSpec
from runtime.torch_tp.orders import Prepared, PrepareOrder, Switched, SwitchOrder
from runtime.torch_tp.shares import Interval, buddies, cut, kept_kv, kv_interval

LIVE_PLANS_MAX = 2
UP_TO_DATE_S = 0.25
"""A copy that took longer is brought up to date once more before the switch, as long as each round takes less than half of the last:
what came meanwhile would cross while nothing runs."""


# --- what moves -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvMove:
    """KV heads of one layer that rank `target` needs and takes from rank `source`; source == target: it has them already."""

    layer: int
    source: int
    target: int
    heads: Interval


def kv_ranges(plan: LayerPlans, layer: int, model: ModelSpec, *, has_buddies: bool = False) -> tuple[Interval, ...]:
    """KV heads that each rank holds in a layer; one that a cut divides is held by both neighbours, and has_buddies adds a neighbour's."""
    widths = plan.layers[layer].query_heads
    if has_buddies:
        return tuple(kept_kv(widths, rank, model) for rank in range(plan.ranks))
    return tuple(kv_interval(cut(widths, rank), model) for rank in range(plan.ranks))


def kv_moves(
    old: LayerPlans, new: LayerPlans, model: ModelSpec, *, old_has_buddies: bool = False, new_has_buddies: bool = False
) -> tuple[KvMove, ...]:
    """How the KV of a slot gets from where `old` has it to where `new` wants it, by layer, then target.

    A rank keeps what it has; the rest comes from the lowest rank that holds it. Raises: ValueError when the plans differ in ranks.
    """
    if old.ranks != new.ranks or len(old.layers) != len(new.layers):
        raise ValueError(
            f"KV moves from {old.ranks} ranks, {len(old.layers)} layers to {new.ranks}, {len(new.layers)}; give plans of one group"
        )
    moves: list[KvMove] = []
    for layer in range(len(old.layers)):
        have = kv_ranges(old, layer, model, has_buddies=old_has_buddies)
        for target, wanted in enumerate(kv_ranges(new, layer, model, has_buddies=new_has_buddies)):
            kept = wanted.intersection(have[target])
            if kept.width:
                moves.append(KvMove(layer, target, target, kept))
            missing = [Interval(wanted.start, wanted.end)] if not kept.width else _around(wanted, kept)
            for part in missing:
                moves += [KvMove(layer, source, target, heads) for source, heads in _sources(part, have)]
    return tuple(moves)


def _around(whole: Interval, inner: Interval) -> list[Interval]:
    return [part for part in (Interval(whole.start, inner.start), Interval(inner.end, whole.end)) if part.width]


def _sources(wanted: Interval, have: Sequence[Interval]) -> Iterable[tuple[int, Interval]]:
    """(rank, heads) that together give `wanted`, each head from the lowest rank that holds it."""
    start = wanted.start
    while start < wanted.end:
        rank = next(rank for rank, held in enumerate(have) if held.start <= start < held.end)
        end = min(have[rank].end, wanted.end)
        yield rank, Interval(start, end)
        start = end


def moved_bytes_per_token(moves: Iterable[KvMove], model: ModelSpec) -> int:
    """Bytes that cross between ranks for each token of a slot that moves."""
    heads = sum(move.heads.width for move in moves if move.source != move.target)
    return round(heads * 2 * model.head_dim * NUMBER_BYTES[model.kv_dtype])


def over_members(plan: LayerPlans, old_members: Sequence[int], new_members: Sequence[int]) -> LayerPlans:
    """The same cuts for a group whose members changed: who joined has zero width, who left must have had none.

    Raises: ValueError where a member with work would be left out.
    """
    gone = [index for index, member in enumerate(old_members) if member not in new_members]

    def mapped(widths: tuple[int, ...]) -> tuple[int, ...]:
        if any(widths[index] for index in gone):
            raise ValueError(f"members {[old_members[index] for index in gone]} have work under plan version {plan.version}: {widths}")
        by_member = dict(zip(old_members, widths, strict=True))
        return tuple(by_member.get(member, 0) for member in new_members)

    layers = tuple(
        replace(cut, query_heads=mapped(cut.query_heads), mlp_blocks=mapped(cut.mlp_blocks), vocabulary_rows=mapped(cut.vocabulary_rows))
        for cut in plan.layers
    )
    return LayerPlans(plan.version, layers)


def taken_over(plan: LayerPlans, old_members: Sequence[int], survivors: Sequence[int], fresh: LayerPlans) -> LayerPlans:
    """`plan` without the members that were lost: each one's heads go to its buddy, who kept their KV, columns and rows as in `fresh`.

    Raises: ValueError where a buddy was lost as well, so that the KV is gone.
    """
    layers = []
    for cuts, new in zip(plan.layers, fresh.layers, strict=True):
        heads = dict(zip(old_members, cuts.query_heads, strict=True))
        for rank, buddy in buddies(cuts.query_heads).items():
            lost, keeper = old_members[rank], old_members[buddy]
            if lost not in survivors:
                if keeper not in survivors:
                    raise ValueError(f"members {lost} and {keeper} were lost, who kept each other's KV")
                heads[keeper] += heads[lost]
        layers.append(replace(new, query_heads=tuple(heads[worker] for worker in survivors), version=plan.version))
    return LayerPlans(plan.version, tuple(layers))


# --- whether it pays --------------------------------------------------------------------------------------------------------


def pays(step_s: float, new_step_s: float, cost_s: float, *, horizon_s: float = 60.0, hysteresis: float = 0.02) -> bool:
    """Whether a new plan is worth its price: the share of time it saves must exceed `hysteresis` (a forecast is noisy, and plans must not
    flap), and over the horizon for which the forecast is trusted it must save more seconds than the change costs.
    """
    saved = 1.0 - new_step_s / step_s if step_s > 0 else 0.0
    return saved > hysteresis and saved * horizon_s > cost_s


# --- the order of acts ------------------------------------------------------------------------------------------------------


class PlanHost(Protocol):
    """What a slide asks of the supervisor."""

    @property
    def plans(self) -> tuple[LayerPlans, ...]: ...

    def slots_of_plan(self, version: int) -> tuple[int, ...]: ...

    def prepare(self, order: PrepareOrder) -> Future[Prepared]: ...

    def switch(self, order: SwitchOrder, plan: LayerPlans | None = None) -> Switched: ...

    def release_plan(self, version: int) -> None: ...


class SlideState(Enum):
    MOVING = "moving"  # KV of the oldest plan's slots is copied ahead, as many slots at a time as find room
    PREPARING = "preparing"  # the ranks get ready for the new plan
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SlideStep:
    """What changed at one boundary between steps. moved: slots that now lie by plan `moved_to`; new_plan: from now on the plan of new
    requests (None: not yet); pause_s: how long the boundary took."""

    moved: tuple[int, ...] = ()
    moved_to: int = 0
    new_plan: LayerPlans | None = None
    pause_s: float = 0.0


class Slide:
    """One change of plan. Call `advance` between any two steps until `is_over`; it blocks only while it switches.

    Nothing has changed until `advance` returns something. Any failure (a rank lost, no room) ends the slide with the old plans in force.
    """

    def __init__(self, host: PlanHost, plan: LayerPlans, price: CopyPrice | None = None) -> None:
        self.plan = plan
        self.price = price or CopyPrice()
        self.state = SlideState.PREPARING
        self.reason = ""
        self._host = host
        self._pending: Future[Prepared] | None = None
        self._copied_s = float("inf")  # by the last round
        if plan.version <= host.plans[-1].version:
            raise ValueError(f"plan version {plan.version} must be above {host.plans[-1].version}, the newest in use")
        if plan.ranks != host.plans[-1].ranks:
            raise ValueError(f"plan version {plan.version} is for {plan.ranks} ranks, the group has {host.plans[-1].ranks}")

    @property
    def is_over(self) -> bool:
        return self.state in (SlideState.DONE, SlideState.FAILED)

    def advance(self) -> SlideStep | None:
        """Go on as far as is possible without waiting.

        Returns: what changed, or None. Raises: GroupError subclasses of the supervisor where the group fell apart in a switch.
        """
        if self.is_over:
            return None
        if self._pending is None:
            self._begin()
            return None
        if not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        error = pending.exception()
        if error is not None:
            self._fail(f"{error}")
            return None
        return self._switch(pending.result())

    def abandon(self, reason: str) -> None:
        """Give the slide up; the ranks drop what they prepared at the next switch or epoch."""
        if not self.is_over:
            self._fail(reason)

    def _begin(self) -> None:
        plans = self._host.plans
        if len(plans) == LIVE_PLANS_MAX and not (slots := self._host.slots_of_plan(plans[0].version)):
            self._host.release_plan(plans[0].version)
            plans = self._host.plans
        if len(plans) < LIVE_PLANS_MAX:
            self.state = SlideState.PREPARING
            self._pending = self._host.prepare(PrepareOrder(plan=self.plan))
        else:
            self.state, self._copied_s = SlideState.MOVING, float("inf")
            self._pending = self._host.prepare(PrepareOrder(moves=slots, to_version=plans[-1].version))

    def _switch(self, prepared: Prepared) -> SlideStep | None:
        if self.state is SlideState.PREPARING:
            switched = self._host.switch(SwitchOrder(uses_plan=True), self.plan)
            self.price.learn_pause(switched.seconds)
            self.state = SlideState.DONE
            return SlideStep(new_plan=self.plan, pause_s=switched.seconds)
        if not prepared.moves:
            self._fail("no room for a copy of any slot of the oldest plan")
            return None
        self.price.learn_copy(prepared.kv_bytes, prepared.seconds)
        if UP_TO_DATE_S < prepared.seconds < self._copied_s / 2:
            self._copied_s = prepared.seconds
            self._pending = self._host.prepare(PrepareOrder(moves=prepared.moves, to_version=self._host.plans[-1].version, goes_on=True))
            return None
        switched = self._host.switch(SwitchOrder(moves=prepared.moves))
        self.price.learn_pause(switched.seconds)
        return SlideStep(moved=switched.moves, moved_to=self._host.plans[-1].version, pause_s=switched.seconds)

    def _fail(self, reason: str) -> None:
        self.state, self.reason = SlideState.FAILED, reason
