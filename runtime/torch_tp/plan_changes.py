"""Changes of a group's split between two steps: as callers wish, as ranks return, as measured speeds drift; one at a time."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from envs.decision.move_prices import CopyPrice
from envs.domain.plans import LayerPlans
from runtime.revival import Revivals
from runtime.torch_tp.group_values import GroupError, GroupGone, GroupRebuilt
from runtime.torch_tp.resplit import Slide, SlideState, SlideStep, pays
from runtime.torch_tp.supervisor import Supervisor

logger = logging.getLogger(__name__)

TAKE_IN_AGAIN_S = 1.0
REVIVE_AFTER_S = 0.2  # the calls that a loss has interrupted have their next token by then

Shares = Mapping[str, Sequence[float]]
""""shares", and where they differ "mlp_shares" and "vocabulary_shares" (`layer_cuts.layer_plans`): one number per member, in rank order."""


def _covers(shares: Mapping[int, float], members: Sequence[int]) -> bool:
    return all(worker in shares for worker in members) and any(shares[worker] for worker in members)


class PlanChanges:
    """`wish` may come from any thread, the rest from the engine's. completed: slides that came to their end."""

    def __init__(self, *, revives: bool, corrects: bool, correct_every_s: float, on_step: Callable[[SlideStep], None]) -> None:
        """revives: start lost ranks again; corrects: follow measured speeds where it pays; on_step: told what a slide changed."""
        self.completed = 0
        self.paused_s = 0.0  # of all slides
        self._revives, self._corrects, self._correct_every_s, self._on_step = revives, corrects, correct_every_s, on_step
        self._revivals = Revivals(REVIVE_AFTER_S)
        self._wishes: deque[tuple[Shares | None, Future[LayerPlans]]] = deque()
        self._slide: Slide | None = None
        self._told: Future[LayerPlans] | None = None
        self._shares: dict[str, dict[int, float]] | None = None  # of each cut by worker, where the caller chose
        self._price = CopyPrice()
        self._corrected_s = time.monotonic()
        self._take_in_from_s = math.inf  # when those that joined are next to be given work; inf: all have theirs

    @property
    def is_sliding(self) -> bool:
        return self._slide is not None

    @property
    def has_wishes(self) -> bool:
        return bool(self._wishes)

    def wish(self, shares: Shares | None) -> Future[LayerPlans]:
        """Ask for a split by `shares` (None: by measured speeds); the future gets the plan in force, or a GroupError."""
        told: Future[LayerPlans] = Future()
        self._wishes.append((shares, told))
        return told

    def group_rebuilt(self, supervisor: Supervisor, detail: str) -> None:
        """No slot holds anything any more, so that no slide can go on; the new plan has work for every member."""
        self._take_in_from_s = math.inf
        if self._slide is not None:
            self._slide.abandon(detail)
            self._end_slide(supervisor)

    def close(self, error: GroupGone) -> None:
        """Nothing will be changed any more."""
        waiting = [told for _, told in self._wishes] + ([] if self._told is None else [self._told])
        self._wishes.clear()
        self._told = None
        for told in waiting:
            told.set_exception(error)

    def tend(self, supervisor: Supervisor) -> None:
        """Go on with what is under way, or begin something. Raises: GroupRebuilt when a rank was lost in it."""
        if self._revives and (absent := supervisor.absent):
            for worker in self._revivals.due(absent, time.monotonic()):
                try:
                    supervisor.respawn(worker)
                except (ValueError, OSError) as error:  # back already, or no process to be had now
                    logger.info("not revived worker=%d reason=%s", worker, error)
        supervisor.raise_unreported()  # before a slide of the new group begins, which it would end
        if self._slide is None and self._revives and (supervisor.spares or time.monotonic() >= self._take_in_from_s):
            self._take_in(supervisor)
        if self._slide is None and self._wishes:
            self._begin_wish(supervisor)
        if self._slide is None and self._corrects:
            self._correct_split(supervisor)
        if self._slide is not None:
            self._advance_slide(supervisor)

    def _take_in(self, supervisor: Supervisor) -> None:
        """Let ranks join with no work, and slide to a plan that gives them some: again, if that slide comes to nothing."""
        spares = supervisor.spares
        try:
            if spares:
                supervisor.join(spares)
            self._take_in_from_s = time.monotonic() + TAKE_IN_AGAIN_S
            self._slide = Slide(supervisor, self._next_plan(supervisor), self._price)
        except (GroupRebuilt, GroupGone):
            raise
        except (GroupError, ValueError) as error:  # being rebuilt just now: the next round asks again
            logger.info("not joined workers=%s reason=%s", list(spares), error)

    def _next_plan(self, supervisor: Supervisor) -> LayerPlans:
        """By the caller's shares where every member has one, else by measured speeds."""
        members = supervisor.members
        cuts = self._shares
        if cuts is None or not all(_covers(shares, members) for shares in cuts.values()):
            return supervisor.next_plan()
        return supervisor.next_plan(**{name: [shares[worker] for worker in members] for name, shares in cuts.items()})

    def _begin_wish(self, supervisor: Supervisor) -> None:
        shares, told = self._wishes.popleft()
        members = supervisor.members
        try:
            for name, given in (shares or {}).items():
                if len(given) != len(members):
                    raise ValueError(f"{len(given)} {name} for the group's {len(members)} members {list(members)}")
            self._slide = Slide(supervisor, supervisor.next_plan(**(shares or {})), self._price)
        except (GroupRebuilt, GroupGone):
            told.set_exception(GroupError("the group was rebuilt meanwhile; ask again"))
            raise
        except (GroupError, ValueError) as error:
            told.set_exception(error)
            return
        self._shares = None if shares is None else {name: dict(zip(members, given, strict=True)) for name, given in shares.items()}
        self._told = told

    def _correct_split(self, supervisor: Supervisor) -> None:
        """Ask every now and then whether the split by measured speeds would pay."""
        now_s = time.monotonic()
        if self._shares is not None or now_s - self._corrected_s < self._correct_every_s or len(supervisor.members) < 2:
            return
        self._corrected_s = now_s
        plan = supervisor.next_plan()
        ratio = supervisor.step_ratio(plan)
        kv_bytes = supervisor.kv_bytes_ahead_of_another_plan()
        if pays(1.0, ratio, self._price.cost_s(kv_bytes, pauses=2 if kv_bytes else 1)):
            logger.info("correcting split plan_version=%d step_ratio=%.3f", plan.version, ratio)
            self._slide = Slide(supervisor, plan, self._price)

    def _advance_slide(self, supervisor: Supervisor) -> None:
        assert self._slide is not None
        slide = self._slide
        step = slide.advance()
        if step is not None:
            self.paused_s += step.pause_s
            self._on_step(step)
        if slide.is_over:
            self._end_slide(supervisor)

    def _end_slide(self, supervisor: Supervisor) -> None:
        slide, self._slide = self._slide, None
        told, self._told = self._told, None
        assert slide is not None
        if slide.state is SlideState.DONE:
            self.completed += 1
            self._take_in_from_s = math.inf
            if told is not None:
                told.set_result(supervisor.plan)
        else:
            logger.info("slide given up plan_version=%d reason=%s", slide.plan.version, slide.reason)
            if told is not None:
                told.set_exception(GroupError(f"the plan was not changed: {slide.reason}"))
