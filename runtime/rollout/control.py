"""The rollout of a serving process: keeps the stage at work, looks at the gates, moves on or back, and says where it stands.

A move counts when it is on the disk. Rolling back is the exception: the candidate decides no more from the moment it is decided, and the
disk is told after.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from runtime.rollout.candidate import Candidate
from runtime.rollout.description import audit_shown, describe
from runtime.rollout.examiner import examined
from runtime.rollout.gates import Verdict
from runtime.rollout.settings import CanaryGate, RolloutEntry
from runtime.rollout.stage_stats import CanaryStats, ShadowStats, canary_stats, read_stats
from runtime.rollout.state import BundleName, InconsistentState, RolloutError, RolloutState, begun, promoted, rolled_back
from runtime.rollout.store import RolloutStore, check_bundle
from runtime.rollout.switchback import Switchback
from runtime.rollout.trials import CanaryTrial, ShadowTrial, Trial
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.policy_guard import PolicyGuard

logger = logging.getLogger(__name__)

TICK_S = 0.1
KEEP_S = 5.0
"""So often the stage's counts are put down: a kill loses at most that much of them, and never the stage."""


class RolloutControl:
    """`state` is what is on the disk. make_guard: a policy process and its guard for a bundle's folder, not started. use: makes a guard the
    incumbent (None: the configured one). configured: digest of the service file's bundle. heuristic, bundle: the configured incumbent."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: RolloutEntry,
        store: RolloutStore,
        make_guard: Callable[[str], PolicyGuard],
        use: Callable[[PolicyGuard | None], Awaitable[None]],
        configured: str = "",
        bundle: str | None = None,
        now_s: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._dispatcher, self.settings, self._store, self._make_guard, self._use = dispatcher, settings, store, make_guard, use
        self._configured, self._bundle, self._now_s, self._unix_s = configured, bundle, now_s, unix_s
        self._moving = asyncio.Lock()
        self._candidate: Candidate | None = None
        self._trial: Trial | None = None
        self._switchback: Switchback | None = None
        self._is_attached = False
        self._looked_s = self._kept_s = now_s()
        self._owed: tuple[str, str] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> RolloutState:
        return self._store.state

    @property
    def stats(self) -> ShadowStats | CanaryStats | None:
        """Counts of the stage at work; None without one."""
        return self._trial.stats if self._trial is not None else None

    def say_url(self, url: str) -> None:
        """Where the rollout's command line finds this service."""
        self._store.say_url(url)

    # --- life -----------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Go on where the rollout stood."""
        if self.state.is_active:
            async with self._moving:
                await self._resume()
        self._task = asyncio.create_task(self._run(), name="rollout")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.state.is_active and self._trial is not None:
            try:
                await self._put_down()
            except OSError as error:
                logger.warning("rollout counts not put down reason=%s", error)
        self._end_trial()
        await self._let_go()
        self._store.close()

    async def _resume(self) -> None:
        candidate = self.state.candidate
        assert candidate is not None
        try:
            check_bundle(candidate)
            await self._begin_stage(read_kept=True)
        except RolloutError as error:
            await self._roll_back("service", str(error))

    # --- what an operator may do ----------------------------------------------------------------------------------------------

    async def begin(self, bundle: Path, evaluation: Path, incumbent_evaluation: Path | None, actor: str) -> dict[str, Any]:
        """Check the evidence, then let the bundle decide in shadow. Raises: RolloutError."""
        async with self._moving:
            begun(self.state, BundleName("", str(bundle), ""), "", "", {}, 0.0)  # says now what forbids a rollout
            settings = self.settings
            evidence = await examined(
                settings.replay, bundle, evaluation, self._incumbent(), incumbent_evaluation, settings.evidence_key_file
            )
            candidate = await asyncio.to_thread(self._store.adopt_bundle, bundle)
            state = begun(self.state, candidate, self._configured, secrets.token_hex(8), evidence, self._unix_s())
            await self._commit(state, "start", actor, {"evidence": evidence})
            await self._begin_stage()
        return await self.status()

    async def promote(self, actor: str, reason: str = "", is_forced: bool = False) -> dict[str, Any]:
        """One stage on. Raises: RolloutError while a gate is not passed, unless forced."""
        async with self._moving:
            if self._trial is not None and not is_forced:
                verdict = self._verdict(self._trial)
                if verdict.move != "promote":
                    raise RolloutError(f"{self.state.title} has not passed its gates: {verdict.reason}")
            await self._promote(actor, reason or ("forced" if is_forced else "every gate passed"))
        return await self.status()

    async def roll_back(self, actor: str, reason: str = "") -> dict[str, Any]:
        """Raises: RolloutError where there is nothing to roll back."""
        async with self._moving:
            await self._roll_back(actor, reason or "asked for")
        return await self.status()

    def apply(self, settings: RolloutEntry, deadline_s: float, outside_max: int) -> None:
        """Live by other gates from now on; share and slices are those with which the stage began."""
        self.settings = settings
        if self._candidate is not None:
            self._candidate.guard.deadline_s, self._candidate.guard.outside_max = deadline_s, outside_max

    async def overrule(self, configured: str, bundle: str | None) -> None:
        """The service file names another incumbent now. Raises: RolloutError while a rollout is under way."""
        async with self._moving:
            if self.state.is_active:
                raise RolloutError(f"bundle: a rollout is under way ({self.state.title}); promote it to its end or roll it back first")
            if self.state.incumbent is not None or self.state.stage == "adopted":
                state = msgspec.structs.replace(
                    self.state, stage="idle", incumbent=None, previous=None, reason="the service file names another"
                )
                await self._commit(state, "overruled", "service", {})
            self._configured, self._bundle = configured, bundle

    def _incumbent(self) -> str | Path:
        if self.state.incumbent is not None:
            return Path(self.state.incumbent.folder)
        return Path(self._bundle) if self._bundle is not None else self._dispatcher.settings.heuristic

    # --- moves, with `_moving` held -------------------------------------------------------------------------------------------

    async def _commit(self, state: RolloutState, event: str, actor: str, detail: dict[str, Any]) -> None:
        try:
            await asyncio.shield(asyncio.to_thread(self._store.commit, state, event, actor, detail))
        except OSError as error:
            raise RolloutError(f"{self._store.folder}: the move cannot be written down ({error})") from error
        logger.info("rollout event=%s actor=%s stage=%s reason=%s", event, actor, state.title.replace(" ", "-"), state.reason)

    async def _promote(self, actor: str, reason: str) -> None:
        detail = {"gates": self._gates()}
        state = promoted(self.state, len(self.settings.canary), reason, self._unix_s())
        await self._commit(state, "promote", actor, detail)
        self._end_trial()
        if state.stage == "adopted":
            candidate, self._candidate, self._switchback = self._candidate, None, None
            await self._use(candidate.guard if candidate is not None else None)
        else:
            await self._begin_stage()

    async def _roll_back(self, actor: str, reason: str) -> None:
        was_adopted = self.state.stage == "adopted"
        state = rolled_back(self.state, reason, self._unix_s())
        detail = {"gates": self._gates()}
        self._end_trial()
        self._switchback = None
        try:
            await self._commit(state, "roll back", actor, detail)
            self._owed = None
        except RolloutError:
            self._owed = actor, reason  # it is done; the disk is told when it can be
            raise
        finally:
            await self._let_go()
            if was_adopted:
                guard = self._make_guard(state.incumbent.folder) if state.incumbent is not None else None
                if guard is not None:
                    await guard.client.start()
                await self._use(guard)

    async def _begin_stage(self, read_kept: bool = False) -> None:
        """The trial of the state's stage; it is attached when the candidate's process is ready."""
        state, settings, dispatcher = self.state, self.settings, self._dispatcher
        assert state.candidate is not None
        if self._candidate is None:
            self._candidate = Candidate(self._make_guard(state.candidate.folder), self._now_s)
            await self._candidate.guard.client.start()
        guard = self._candidate.guard
        self._candidate.begin_stage()
        if state.stage == "shadow":
            stats = read_stats(ShadowStats, state.stats) if read_kept and state.stats else ShadowStats()
            self._trial = ShadowTrial(dispatcher, guard, lambda: self.settings, stats)
        else:
            if state.step >= len(settings.canary):
                raise RolloutError(f"the service file has {len(settings.canary)} canary stages; the rollout stands at {state.step + 1}")
            gate = settings.canary[state.step]
            fresh = canary_stats(settings.error_chance, len(settings.canary))
            counted = read_stats(CanaryStats, state.stats) if read_kept and state.stats else fresh
            multiplier = dispatcher.settings.limit_multiplier
            begin_s, first = self._now_s(), state.pairs_begun
            if self._switchback is not None:
                first = max(first, self._switchback.pairs_begun)
            self._switchback = Switchback(settings, gate.share, state.salt, begin_s, first, multiplier, self._now_s, self._switchback)
            if read_kept:
                self._remember_arms(self._switchback)
            self._trial = CanaryTrial(dispatcher, guard, lambda: self.settings, self._canary_gate, counted, self._switchback)
        self._looked_s = self._kept_s = self._now_s()
        self._attach_if_ready()

    def _canary_gate(self) -> CanaryGate:
        """Of the stage at work, as the service file has it now."""
        return self.settings.canary[min(self.state.step, len(self.settings.canary) - 1)]

    def _attach_if_ready(self) -> None:
        if not self._is_attached and self._trial is not None and self._candidate is not None and self._candidate.is_ready:
            self._is_attached = True
            self._looked_s = self._now_s()
            self._trial.attach()

    def _end_trial(self) -> None:
        """From here on the candidate decides nothing and nothing is counted."""
        trial, self._trial = self._trial, None
        if trial is not None and self._is_attached:
            trial.detach()
        self._is_attached = False

    async def _let_go(self) -> None:
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            await candidate.guard.client.close()

    # --- looking --------------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                async with self._moving:
                    await self.look()
            except Exception:  # the next look may go well
                logger.exception("rollout could not look")

    async def look(self) -> None:
        """Look at the gates once, and do what follows."""
        if self._owed is not None:
            await self._roll_back(*self._owed)
        if self._trial is None or self._candidate is None:
            return
        self._attach_if_ready()
        now_s = self._now_s()
        self._candidate.guard.trip_if_silent()
        if self._is_attached:
            self._trial.look(now_s - self._looked_s)
        self._looked_s = now_s
        verdict = self._verdict(self._trial)
        if verdict.move == "roll_back":
            await self._roll_back("gates", verdict.reason)
        elif verdict.move == "promote" and self.settings.automatic:
            await self._promote("gates", verdict.reason)
        elif now_s - self._kept_s >= KEEP_S:
            self._kept_s = now_s
            await self._put_down()

    async def _put_down(self) -> None:
        assert self._trial is not None
        pairs = self._switchback.pairs_begun if self._switchback is not None else self.state.pairs_begun
        state = msgspec.structs.replace(self.state, stats=self._trial.kept(), pairs_begun=pairs)
        arms = self._switchback.kept() if self._switchback is not None else []

        def put_down() -> None:
            self._store.put_down(state)
            if arms:
                self._store.put_down_arms(arms)

        await asyncio.shield(asyncio.to_thread(put_down))

    def _remember_arms(self, switchback: Switchback) -> None:
        """After a restart: a user or session keeps its arm. A file that cannot be read costs that, and no more."""
        try:
            switchback.remember(self._store.arms())
        except (OSError, InconsistentState) as error:
            logger.warning("rollout arms not read reason=%s", error)

    def _verdict(self, trial: Trial) -> Verdict:
        candidate = self._candidate
        return trial.verdict(candidate.fault(self.settings.faults_max, self._is_attached) if candidate is not None else "")

    # --- saying ---------------------------------------------------------------------------------------------------------------

    def _gates(self) -> list[dict[str, Any]]:
        return [] if self._trial is None else [asdict(gate) for gate in self._verdict(self._trial).gates]

    async def status(self) -> dict[str, Any]:
        """Everything an operator asks about; numbers that nobody knows yet are None."""
        said = describe(self.state, self.settings, self._incumbent())
        candidate, trial = self._candidate, self._trial
        said["is_running"] = trial is not None and self._is_attached
        if trial is not None and candidate is not None:
            guard = candidate.guard
            verdict = self._verdict(trial)
            said |= {"gates": [asdict(gate) for gate in verdict.gates], "next_move": verdict.move, "next_step": verdict.reason}
            said |= trial.shown()
            said["policy"] = {
                "state": guard.client.state, "breaker": guard.breaker.state.name.lower(), "breaker_reason": guard.breaker.reason,
                "agreement": guard.agreement.share, "fallbacks": dict(guard.causes),
            }  # fmt: skip
        said["audit"] = await asyncio.to_thread(audit_shown, self._store.folder)
        return said
