"""The plans that a group lives by, and which slots lie by which: what the next epoch keeps of them. Knows no process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from envs.decision.layer_cuts import layer_plans
from envs.domain.plans import LayerPlans
from envs.domain.specs import ModelSpec
from runtime.torch_tp.group_values import GroupGone
from runtime.torch_tp.orders import Carried, CarryOrder, Switched, SwitchOrder
from runtime.torch_tp.profiler import RankProfile, balanced_cuts
from runtime.torch_tp.resplit import LIVE_PLANS_MAX, kv_moves, moved_bytes_per_token, over_members, taken_over
from runtime.torch_tp.slot_records import SlotRecords

logger = logging.getLogger(__name__)


class GroupPlans:
    """live: oldest first; new requests get the last. buddied: versions whose slots keep a neighbour's KV. model: once a worker told it."""

    def __init__(self, profile: RankProfile, has_buddies: bool) -> None:
        self.live: tuple[LayerPlans, ...] = ()
        self.buddied: set[int] = set()
        self.records = SlotRecords()
        self.model: ModelSpec | None = None
        self._profile, self._has_buddies = profile, has_buddies
        self._versions = count(1)

    @property
    def newest(self) -> LayerPlans:
        """Raises: GroupGone before the first group stands."""
        if not self.live:
            raise GroupGone("no group stands yet, so there is no plan")
        return self.live[-1]

    def next(self, workers: Sequence[int], shares: Sequence[float] | None = None, **cuts: Any) -> LayerPlans:
        """A plan of the next version over these workers: by `shares`, or by their measured speeds; cuts: as in `layer_plans`."""
        if self.model is None:
            raise GroupGone("no group stands yet, so there is nothing to plan for")
        balanced = {"shares": shares} if shares is not None else balanced_cuts(self._profile.speeds(workers))
        return layer_plans(self.model, version=next(self._versions), **{**balanced, **cuts})

    # --- a new epoch --------------------------------------------------------------------------------------------------------

    def begin_anew(self, workers: Sequence[int]) -> None:
        """One fresh plan; no slot holds anything."""
        self.live = (self.next(workers),)
        self.records.clear()
        self.buddied = {plan.version for plan in self.live} if self._has_buddies else set()

    def take_over(self, members: Sequence[int], survivors: Sequence[int]) -> bool:
        """Give the lost members' heads to their buddies in all live plans. False, and nothing changed, where the KV is not all there."""
        if not {plan.version for plan in self.live} <= self.buddied:
            return False
        assert self.model is not None
        fresh = layer_plans(self.model, version=self.newest.version, **balanced_cuts(self._profile.speeds(survivors)))
        try:
            self.live = tuple(taken_over(plan, members, survivors, fresh) for plan in self.live)
        except ValueError as error:
            logger.warning("KV is gone reason=%s", error)
            return False
        self.buddied = set()  # who was lost kept somebody's KV as well
        return True

    def over(self, members: Sequence[int], new_members: Sequence[int]) -> tuple[LayerPlans, ...]:
        """The live plans for a group whose members changed, see `over_members`."""
        return tuple(over_members(plan, members, new_members) for plan in self.live)

    # --- within an epoch ----------------------------------------------------------------------------------------------------

    def switched(self, order: SwitchOrder, plan: LayerPlans | None, answers: Mapping[int, Switched]) -> Switched:
        """All ranks carried out a switch; returns what it took the group: bytes of all ranks, the time of the slowest."""
        if order.uses_plan and plan is not None:
            self.live = (*self.live, plan)
            if self._has_buddies:
                self.buddied.add(plan.version)
        if order.columns is not None:
            self.live = (*self.live[:-1], order.columns)
        moved = answers[min(answers)].moves
        self.records.moved(moved, self.newest.version)
        return Switched(moved, sum(answer.kv_bytes for answer in answers.values()), max(answer.seconds for answer in answers.values()))

    def carried(self, order: CarryOrder, answers: Mapping[int, Carried]) -> Carried:
        """All ranks wrote or filled a slot; returns what it took the group, and the first error."""
        every = list(answers.values())
        error = next((answer.error for answer in every if answer.error), "")
        if not order.gives and not error:
            self.records.filled(order.slot, order.end)
        return Carried(sum(answer.kv_bytes for answer in every), max(answer.seconds for answer in every), error)

    def kv_bytes_ahead_of_another(self) -> int:
        """KV that must move before one more plan can be used: that of the oldest's slots, where as many plans live as may."""
        if len(self.live) < LIVE_PLANS_MAX or self.model is None:
            return 0
        oldest, newest = self.live[0], self.live[-1]
        tokens = self.records.tokens_of_plan(oldest.version)
        return tokens * moved_bytes_per_token(kv_moves(oldest, newest, self.model), self.model) if tokens else 0

    def release(self, version: int) -> None:
        """Forget a plan that no slot uses any more. Raises: ValueError for the newest, an unknown one, or one in use."""
        if version not in [plan.version for plan in self.live[:-1]]:
            raise ValueError(f"plan version {version} is not an older live plan; live: {[plan.version for plan in self.live]}")
        if users := self.records.of_plan(version):
            raise ValueError(f"plan version {version} is used by slots {list(users)}; move or release them first")
        self.live = tuple(plan for plan in self.live if plan.version != version)
