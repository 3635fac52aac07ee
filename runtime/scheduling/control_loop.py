"""The control loop: at each tick the split and the rebalance decision, as in simulation, and the command that comes of it.

The same candidates, masks, encoder and heuristics as the simulator's (`envs.decision`); a policy answers where one is configured and
behaves,
else the heuristic. What `envs.decision.move_discipline` does not allow is masked before anybody chooses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from agents.heuristics import make as make_heuristic
from agents.heuristics.controlling import GAIN, KEEP, PRICE, TARGET_BACKLOG
from envs.decision.actions import Decision, DecisionPoint, Scheduler
from envs.decision.move_candidates import DeclaredHealth, MoveCandidates, rebalance_candidates, split_candidates
from envs.decision.move_discipline import SCALES, MoveDiscipline
from envs.decision.observation import encode
from envs.domain.commands import CommandKind
from runtime.scheduling.control_settings import ControlSettings
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.move_execution import MoveExecution
from runtime.scheduling.online_scheduler import HEURISTIC, POLICY
from runtime.scheduling.policy_guard import PolicyGuard
from runtime.scheduling.recent_decisions import RecentDecisions

logger = logging.getLogger(__name__)

DECISIONS: tuple[Decision, ...] = ("split", "rebalance")
_CANDIDATES = {"split": split_candidates, "rebalance": rebalance_candidates}


def reason_of(found: MoveCandidates, index: int) -> str:
    """What a move is expected to bring, in words."""
    kind, gain = found.commands[index].kind, float(found.moves[index, GAIN])
    pressure_s = float(np.expm1(found.moves[index, TARGET_BACKLOG]))
    if kind in SCALES:
        return f"mean backlog {pressure_s:.2f} s"
    what = "starts" if kind is CommandKind.REQUEUE else "steps"
    return f"{what} predicted {np.exp(gain):.2f} times as fast"


class Decider:
    """One kind of control decision: the policy within its deadline, else the heuristic. `counts`: (source, cause) -> decisions."""

    def __init__(self, heuristic: Scheduler, guard: PolicyGuard | None, deadline_s: float) -> None:
        self._heuristic, self.guard, self._deadline_s = heuristic, guard, deadline_s
        self.counts: Counter[tuple[str, str]] = Counter()

    async def choose(self, point: DecisionPoint) -> tuple[int, str, str]:
        """(allowed candidate, source, why it is not the policy's)."""
        index, cause = await self._by_policy(point) if self.guard is not None else (None, "no_policy")
        source = POLICY
        if index is None:
            index, source = self._by_heuristic(point), HEURISTIC
        self.counts[source, cause] += 1
        return index, source, cause

    def rehearse(self, point: DecisionPoint) -> None:
        self._heuristic.choose(point)

    async def _by_policy(self, point: DecisionPoint) -> tuple[int | None, str]:
        assert self.guard is not None
        candidates, context = encode(point, len(point.commands))
        if not (np.isfinite(candidates).all() and np.isfinite(context).all()):
            return None, "observation_not_finite"
        choice = await self.guard.choose(candidates, context, point.mask, self._deadline_s, lambda: self._by_heuristic(point))
        return choice.index, choice.cause

    def _by_heuristic(self, point: DecisionPoint) -> int:
        """Keeping everything as it is where it fails."""
        try:
            index = int(self._heuristic.choose(point))
            if 0 <= index < len(point.commands) and point.mask[index]:
                return index
            logger.error("heuristic chose what is not allowed decision=%s index=%d", point.decision, index)
        except Exception:  # a bug of ours must not end the loop
            logger.exception("heuristic failed decision=%s", point.decision)
        return KEEP


class ControlLoop:
    """`tick` may be called by hand (tests); `start` calls it every `tick_s`. `moves` carries out, `recent` remembers what was decided."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: ControlSettings | None = None,
        guards: Mapping[Decision, PolicyGuard] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self.dispatcher, self.settings, self._now_s = dispatcher, settings or ControlSettings(), now_s
        chosen, guards = self.settings, guards or {}
        rngs = np.random.default_rng(seed).spawn(len(DECISIONS))
        self.deciders = {
            decision: Decider(make_heuristic(decision, getattr(chosen, decision), rng), guards.get(decision), chosen.deadline_s)
            for decision, rng in zip(DECISIONS, rngs, strict=True)
        }
        self.discipline = MoveDiscipline(len(dispatcher.backends), now_s, chosen.discipline())
        self.moves = MoveExecution(dispatcher, chosen, now_s, self.discipline.made)
        self.recent = RecentDecisions()
        self.ticks = 0
        self.last_tick_at_s: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._carrying: set[asyncio.Task[object]] = set()

    def rehearse(self) -> None:
        """Both decisions, of which nothing comes: loads the compiled code that they need."""
        dispatcher = self.dispatcher
        view, tables, plans = dispatcher.view(), dispatcher.telemetry.experience.tables, tuple(dispatcher.plans.plans)
        view = view._replace(is_up=np.ones_like(view.is_up))  # nothing is planned for groups that are down
        for decision in DECISIONS:
            found = _CANDIDATES[decision](view, dispatcher.telemetry.groups, plans, tables, self._declared_health())
            point = DecisionPoint(decision, view, found.commands, found.mask, tables, moves=found.moves)
            encode(point, len(point.commands))
            self.deciders[decision].rehearse(point)

    async def start(self) -> None:
        for decider in self.deciders.values():
            if decider.guard is not None:
                await decider.guard.client.start()
        if self.settings.is_on:
            self._task = asyncio.create_task(self._run(), name="control-loop")

    async def close(self) -> None:
        tasks = [*self._carrying, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.moves.close()
        for decider in self.deciders.values():
            if decider.guard is not None:
                await decider.guard.client.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.settings.tick_s)
            try:
                await self.tick()
            except Exception:  # one bad tick is no reason to stop looking after the groups
                logger.exception("control tick failed")

    async def tick(self) -> None:
        """Both decisions, one after the other; what they order goes on beside."""
        self.ticks += 1
        self.last_tick_at_s = time.time()
        for decision in DECISIONS:
            await self._decide(decision)

    async def settle(self) -> None:
        """Until everything that was ordered has come to its end."""
        while self._carrying:
            await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _decide(self, decision: Decision) -> None:
        dispatcher, began_s = self.dispatcher, self._now_s()
        view, tables = dispatcher.view(), dispatcher.telemetry.experience.tables
        health = self._declared_health()
        make, plans = _CANDIDATES[decision], tuple(dispatcher.plans.plans)
        # planning takes milliseconds where a mix is new, and calls must not wait for it
        found = await asyncio.to_thread(make, view, dispatcher.telemetry.groups, plans, tables, health)
        found = self._with_measured_prices(found)
        possible = np.array([not self.moves.why_not(command) for command in found.commands], np.bool_)
        mask, why_not = self.discipline.judge(replace(found, mask=found.mask & possible))
        why_not = [self.moves.why_not(command) or why for command, why in zip(found.commands, why_not, strict=True)]
        if not mask[1:].any():
            return
        point = DecisionPoint(decision, view, found.commands, mask, tables, moves=found.moves)
        index, source, cause = await self.deciders[decision].choose(point)
        smaller = self.discipline.smallest_sufficient(found, mask, index)
        if index == KEEP:
            return
        self.recent.note(point, mask, smaller, source, cause, self._now_s() - began_s, why_not)
        self._order(found, smaller, source, reason_of(found, smaller) + ("; tried before a larger move" if smaller != index else ""))

    def _declared_health(self) -> DeclaredHealth:
        chosen = self.settings
        return self.dispatcher.plans.declared_health(
            self.moves.may_start(), chosen.cold_start_s, chosen.rebuild_s, chosen.fall_back_stay_s
        )  # fmt: skip

    def _with_measured_prices(self, found: MoveCandidates) -> MoveCandidates:
        """A change of split costs what the last ones of its group did, where there were any, and so does moving a call; joining ranks to a
        group costs a start, as the last ones took."""
        moves = found.moves.copy()
        for index, command in enumerate(found.commands):
            price_s = None
            if command.kind in (CommandKind.SET_SPLIT, CommandKind.FALL_BACK, CommandKind.RESTORE):
                price_s = self.dispatcher.plans.split_price_s(command.group_index)
            elif command.kind is CommandKind.MIGRATE:
                price_s = self.moves.migration.measured_price_s(command)
            elif command.kind is CommandKind.REGROUP:
                price_s = self.dispatcher.plans.cold_start_s
            if price_s is not None:
                moves[index, PRICE] = np.log1p(price_s)
        return replace(found, moves=moves)

    def _order(self, found: MoveCandidates, index: int, source: str, reason: str) -> None:
        price_s = float(np.expm1(found.moves[index, PRICE]))
        task = asyncio.create_task(self.moves.carry_out(found.commands[index], source, reason, price_s), name="move")
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    def next_tick_s(self) -> float | None:
        """Seconds until the next tick; None while the loop is off."""
        if self._task is None or self.last_tick_at_s is None:
            return self.settings.tick_s if self._task is not None else None
        return max(0.0, self.settings.tick_s - (time.time() - self.last_tick_at_s))
