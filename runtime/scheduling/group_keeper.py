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
from runtime.backends.interface import Backend
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.held_calls import HeldCalls
from runtime.scheduling.prefix_memory import PrefixMemory
from runtime.scheduling.telemetry import Telemetry

logger = logging.getLogger(__name__)


class GroupKeeper:
    """Tells `panel` who is gone and who is back, `telemetry` what is reported, and `held` when a call may try again."""

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
    ) -> None:
        self._backends, self._telemetry, self._panel, self._prefixes = backends, telemetry, panel, prefixes
        self._held, self.settings, self._counts, self._now_s = held, settings, counts, now_s
        self._tasks: list[asyncio.Task[None]] = []
        self._probing: dict[int, asyncio.Task[None]] = {}
        self._is_up = np.zeros(len(backends), np.bool_)
        self._last_token_s = np.full(len(backends), -math.inf)

    async def start(self) -> None:
        """Start every group that is not parked; returns when one can serve. The others are waited for and kept up beside."""
        started = asyncio.Event()
        for backend in self._backends:
            if not self._telemetry.is_parked[backend.group_index]:
                self._tasks.append(asyncio.create_task(self._keep(backend, started), name=f"keeper-{backend.name}"))
        self._tasks.append(asyncio.create_task(self._watch(), name="telemetry-watch"))
        await started.wait()

    async def close(self) -> None:
        tasks = [*self._tasks, *self._probing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(backend.close() for backend in self._backends), return_exceptions=True)

    def alive(self) -> BoolArray:
        """Groups that are started and whose process is not known to be gone, shape (groups,)."""
        return self._is_up & np.fromiter((backend.is_alive for backend in self._backends), np.bool_, len(self._backends))

    def token_made(self, g: int, now_s: float) -> None:
        """Group `g` gave somebody a token."""
        self._last_token_s[g] = now_s

    async def is_ready(self) -> bool:
        """Whether a token can really be made: one was, lately, or a probe makes one (K22)."""
        alive = self.alive()
        recent = self._now_s() - self._last_token_s < self.settings.ready_within_s
        if (alive & recent).any():
            return True
        probes = [asyncio.ensure_future(self._backends[g].probe()) for g in np.flatnonzero(alive).tolist()]
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

    async def _keep(self, backend: Backend, started: asyncio.Event) -> None:
        """Start a group, watch that its process lives, start it again; its breaker is forced open while it is gone."""
        g, wait_s = backend.group_index, self.settings.restart_s
        while True:
            try:
                await backend.start()
            except Exception as error:  # whatever it was, the others serve on
                logger.warning("group not started group=%s reason=%s", backend.name, error)
                self._panel.breakers[g].force_open(f"not started: {error}")
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, self.settings.restart_max_s)
                continue
            self._telemetry.forget(g)
            self._prefixes.forget(g)
            self._is_up[g] = True
            self._panel.breakers[g].revive()
            started.set()
            self._held.ring()
            began_s = self._now_s()
            while backend.is_alive:
                await asyncio.sleep(0.05)
            self._is_up[g] = False
            self._panel.breakers[g].force_open("its process is gone")
            logger.warning("group lost group=%s", backend.name)
            self._counts["groups_lost"] += 1
            self._held.ring()
            if self._now_s() - began_s > 60.0:
                wait_s = self.settings.restart_s
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self.settings.restart_max_s)

    async def _watch(self) -> None:
        """Hand reports to the telemetry, and let held calls ask again when a breaker's time has come."""
        while True:
            await asyncio.sleep(self.settings.report_period_s)
            for backend in self._backends:
                try:
                    report = backend.report()
                    if report is not None:
                        self._telemetry.take_report(backend.group_index, report)
                except Exception as error:  # one group's nonsense must not blind us to the others
                    self._counts["bad_reports"] += 1
                    logger.error("report not understood group=%s reason=%s: %s", backend.name, type(error).__name__, error)
            for g in self._panel.due_probes().tolist():
                self._probe_half_open(g)
            if self._held.count:
                self._held.ring()

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
