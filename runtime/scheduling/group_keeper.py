"""Keeps the groups up: starts them, notices that one is gone, starts it again, probes those on their way back, takes in their reports."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from envs.decision.circuit_breaker import BreakerPanel, Outcome
from envs.domain.snapshot import BoolArray
from runtime.backends.interface import Backend, BackendFault
from runtime.revival import STAYED_S
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.held_calls import HeldCalls
from runtime.scheduling.prefix_memory import PrefixMemory
from runtime.scheduling.served_plans import ServedPlans
from runtime.scheduling.telemetry import Telemetry

logger = logging.getLogger(__name__)


class GroupKeeper:
    """Tells `panel` who is gone and who is back, `telemetry` what is reported, and `held` when a call may try again.

    not_started: by group, why its last start failed. is_returning (groups,): it is let go to be started again at once, so that a call that
    nobody else can take had better wait.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        telemetry: Telemetry,
        panel: BreakerPanel,
        prefixes: PrefixMemory,
        held: HeldCalls,
        settings: DispatchSettings,
        counts: Counter[str],
        now_s: Callable[[], float],
        plans: ServedPlans,
    ) -> None:
        self._backends, self._telemetry, self._panel, self._prefixes = backends, telemetry, panel, prefixes
        self._held, self.settings, self._counts, self._now_s = held, settings, counts, now_s
        self._plans = plans
        self._tasks: list[asyncio.Task[None]] = []
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._started = asyncio.Event()
        self._probing: dict[int, asyncio.Task[None]] = {}
        self._is_up = [False] * len(backends)
        self.not_started: dict[int, str] = {}
        self.is_returning = np.zeros(len(backends), np.bool_)
        self._last_token_s = np.full(len(backends), -math.inf)

    async def start(self) -> None:
        """Start every group that is not parked; returns when one can serve. The others are waited for and kept up beside."""
        for backend in self._backends:
            if not self._telemetry.is_parked[backend.group_index]:
                self.start_group(backend.group_index, warms_up=False)
        self._tasks.append(asyncio.create_task(self._watch(), name="telemetry-watch"))
        await self._started.wait()

    def start_group(self, g: int, warms_up: bool = True) -> None:
        """Start group `g` and keep it up. warms_up: it counts as up only once it has made a token."""
        if g not in self._keepers:
            backend = self._backends[g]
            self.not_started.pop(g, None)
            self._keepers[g] = asyncio.create_task(self._keep(backend, warms_up), name=f"keeper-{backend.name}")

    async def stop_group(self, g: int) -> None:
        """Let group `g` go; whoever is inside is lost there."""
        self._is_up[g] = False
        keeper = self._keepers.pop(g, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await self._backends[g].close()
        self._forget(g)

    def _forget(self, g: int) -> None:
        """Another process stands behind group `g`, or none: what was known of the last one's inside is void."""
        self._telemetry.forget(g)
        self._prefixes.forget(g)
        self._plans.forget(g)

    def take_report_now(self, g: int) -> None:
        """Something changed in group `g`: hear it at once."""
        self._take_report(self._backends[g])

    async def close(self) -> None:
        tasks = [*self._tasks, *self._keepers.values(), *self._probing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(backend.close() for backend in self._backends), return_exceptions=True)

    def alive(self) -> BoolArray:
        """Groups that are started and whose process is not known to be gone, shape (groups,)."""
        return np.array([up and backend.is_alive for up, backend in zip(self._is_up, self._backends, strict=True)], np.bool_)

    def open_to_new(self) -> BoolArray:
        """Groups alive that nobody drains: the others take no new calls, however well they are; shape (groups,)."""
        return self.alive() & ~self._telemetry.is_draining

    def token_made(self, g: int, now_s: float) -> None:
        """Group `g` gave somebody a token."""
        self._last_token_s[g] = now_s

    async def is_ready(self) -> bool:
        """Whether a token can really be made for a new call: one was, lately, or a probe makes one (K22)."""
        can_take = self.open_to_new()
        recent = self._now_s() - self._last_token_s < self.settings.ready_within_s
        if (can_take & recent).any():
            return True
        probes = [asyncio.ensure_future(self._backends[g].probe()) for g in np.flatnonzero(can_take).tolist()]
        try:
            for done in asyncio.as_completed(probes, timeout=self.settings.ready_within_s):
                if await done:
                    return True
        except TimeoutError:
            pass
        finally:
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
        return False

    async def _keep(self, backend: Backend, warms_up: bool) -> None:
        """Start a group, watch that its process lives, start it again: at once where it had stayed, as a rank is, else ever later. Its
        breaker is forced open while it is gone."""
        g, wait_s = backend.group_index, self.settings.restart_s
        while True:
            try:
                await backend.start()
                if warms_up and not await backend.probe():
                    raise BackendFault(f"{backend.name}: made no token")
            except Exception as error:  # whatever it was, the others serve on
                logger.warning("group not started group=%s reason=%s", backend.name, error)
                self._panel.breakers[g].force_open(f"not started: {error}")
                self.not_started[g] = str(error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, self.settings.restart_max_s)
                continue
            self._forget(g)
            self._is_up[g] = True
            self.not_started.pop(g, None)
            self._panel.breakers[g].revive()
            self._started.set()
            self._held.ring()
            began_s = self._now_s()
            while backend.is_alive:
                await asyncio.sleep(0.05)
            self._is_up[g] = False
            self._panel.breakers[g].force_open("its process is gone")
            logger.warning("group lost group=%s", backend.name)
            self._counts["groups_lost"] += 1
            self._held.ring()
            if self._now_s() - began_s >= STAYED_S:  # at once
                wait_s = self.settings.restart_s
                continue
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self.settings.restart_max_s)

    async def _watch(self) -> None:
        """Hand reports to the telemetry, and let held calls ask again when a breaker's time has come."""
        while True:
            await asyncio.sleep(self.settings.report_period_s)
            for backend in self._backends:
                self._take_report(backend)
            for g in self._panel.due_probes().tolist():
                self._probe_half_open(g)
            if self._held.count:
                self._held.ring()

    def _take_report(self, backend: Backend) -> None:
        try:
            report = backend.report()
            if report is not None:
                self._telemetry.take_report(backend.group_index, report)
                self._plans.take_report(backend.group_index, report)
        except Exception as error:  # one group's nonsense must not blind us to the others
            self._counts["bad_reports"] += 1
            logger.error("report not understood group=%s reason=%s: %s", backend.name, type(error).__name__, error)

    def _probe_half_open(self, g: int) -> None:
        """A group on its way back is asked for a token of nobody's, so that its return does not hang on a scheduler's taste (K13)."""
        if self._probing.get(g) is not None or (lease := self._panel.breakers[g].try_probe()) is None:
            return

        async def probe() -> None:
            began_s, outcome = self._now_s(), Outcome.FAULT
            try:
                outcome = Outcome.OK if await self._backends[g].probe() else Outcome.FAULT
            finally:
                self._panel.breakers[g].record(outcome, began_s=began_s, lease=lease, reason="made no token")
                self._probing.pop(g, None)
                self._held.ring()

        self._probing[g] = asyncio.create_task(probe(), name=f"probe-{self._backends[g].name}")
