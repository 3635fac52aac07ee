"""Reading the service file again while serving: limits, keys, gates and the bundle change, and no stream is dropped.

All or nothing: a file that cannot be read, a bundle that cannot be used, or a change that only a restart can make, changes nothing and is
told in one line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from envs.decision.actions import Decision
from runtime.gateway.generation import Generation
from runtime.gateway.settings import FIXED as GATEWAY_FIXED
from runtime.rollout.state import RolloutError
from runtime.rollout.store import configured_digest
from runtime.scheduling.control_loop import DECISIONS
from runtime.scheduling.dispatch_settings import FIXED as DISPATCH_FIXED
from runtime.scheduling.policy_guard import PolicyGuard
from runtime.service import Service
from runtime.service_config import ServiceConfig

logger = logging.getLogger(__name__)

READY_S = 15.0
"""A new policy process gets so long to load its bundle."""
WAITING_MAX = 16
FIXED = (
    "cluster", "model_name", "model_path", "groups", "host", "port", "records", "control", "split_bundle", "rebalance_bundle", "tracing",
)  # fmt: skip


class ReloadRefused(ValueError):
    """Nothing was changed; the message says why, in one line."""


class Reloader:
    """`read` gives the service file as it is now, command line included. `reloads` and `refusals` count."""

    def __init__(self, service: Service, generation: Generation, read: Callable[[], ServiceConfig]) -> None:
        self._service, self._generation, self._read = service, generation, read
        self._turn, self._waiting = asyncio.Lock(), 0
        self.reloads = self.refusals = 0
        self.on_change: Callable[[ServiceConfig], None] = lambda config: None

    async def reload(self) -> list[str]:
        """Names of what changed. Raises: ReloadRefused."""
        if self._waiting >= WAITING_MAX:
            raise ReloadRefused(f"{self._waiting} reloads wait already")
        self._waiting += 1
        try:
            return await self._in_turn()
        finally:
            self._waiting -= 1

    async def _in_turn(self) -> list[str]:
        async with self._turn:
            try:
                changed = await self._reload()
            except ReloadRefused as refused:
                self.refusals += 1
                logger.warning("reload refused reason=%s", refused)
                raise
        self.reloads += 1
        logger.info("reloaded changed=%s", ",".join(changed) or "nothing")
        return changed

    async def _reload(self) -> list[str]:
        service, old = self._service, self._service.config
        try:
            new = await asyncio.to_thread(self._read)
        except ValueError as error:
            raise ReloadRefused(str(error)) from error
        fixed = fixed_changes(old, new)
        if fixed:
            raise ReloadRefused(f"{', '.join(fixed)}: cannot be changed while serving; restart the service, or put the old value back")
        digest = await asyncio.to_thread(configured_digest, new.bundle)
        has_new_bundle = new.bundle != old.bundle or digest != service.bundle_digest or _is_refused(service.dispatcher.scheduler.guard, new)
        made: dict[Decision, PolicyGuard] = {}
        try:
            if has_new_bundle and new.bundle is not None:
                made["route"] = await self._ready_guard("route", new.bundle, digest)
            for decision in DECISIONS:
                if found := await self._replaced(decision, new.bundle_of(decision)):
                    made[decision] = await self._ready_guard(decision, *found)
            if has_new_bundle and service.rollout is not None:
                await service.rollout.overrule(digest, new.bundle)
        except (RolloutError, ReloadRefused) as error:
            for guard in made.values():
                await guard.client.close()
            raise ReloadRefused(str(error)) from error
        changed = live_changes(old, new) + (["bundle"] if has_new_bundle else [])
        self._apply(new)
        if has_new_bundle:
            service.bundle_digest = digest
            await service.use_guard(made.pop("route", None))
        for decision, guard in made.items():
            service.use_control_guard(decision, guard)
        return changed + [f"{decision}_bundle" for decision in made]

    async def _replaced(self, decision: Decision, bundle: str | None) -> tuple[str, str] | None:
        """(bundle, digest) of a split or rebalance policy whose files are others than those that were loaded."""
        guard = self._service.control.deciders[decision].guard
        if guard is None or bundle is None:
            return None
        digest = await asyncio.to_thread(configured_digest, bundle)
        is_same = digest == guard.client.digest and guard.client.state != "refused"
        return None if is_same else (bundle, digest)

    def _apply(self, new: ServiceConfig) -> None:
        service = self._service
        service.config = new
        service.dispatcher.apply(new.dispatch)
        self._generation.apply(new.gateway)
        self._generation.smaller.use(new.smaller_model)
        guard, deadline_s = service.dispatcher.scheduler.guard, new.scheduler.deadline_ms / 1000.0
        if guard is not None:
            guard.deadline_s, guard.outside_max = deadline_s, new.scheduler.outside_max
            guard.agreement.low, guard.agreement.high = new.scheduler.agreement_min, new.scheduler.agreement_max
        if service.rollout is not None:
            service.rollout.apply(new.rollout, deadline_s, new.scheduler.outside_max)
        self.on_change(new)

    async def _ready_guard(self, decision: Decision, bundle: str, digest: str) -> PolicyGuard:
        """A policy process that has loaded a bundle whose files have this digest. Raises: ReloadRefused."""
        deadline_s, key = (None, "bundle") if decision == "route" else (self._service.config.control.deadline_s, f"{decision}_bundle")
        guard = self._service.make_guard(bundle, decision, deadline_s, digest)
        await guard.client.start()
        try:
            async with asyncio.timeout(READY_S):
                while guard.client.state not in ("ready", "refused"):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            await guard.client.close()
            raise ReloadRefused(f"{key}: {bundle}: its process was not ready within {READY_S:g} s") from None
        if guard.client.state == "refused":
            detail = guard.client.detail
            await guard.client.close()
            raise ReloadRefused(f"{key}: {detail}")
        return guard


def _is_refused(guard: PolicyGuard | None, config: ServiceConfig) -> bool:
    """Whether the configured bundle's process stands still because its files were not those that were to be loaded."""
    return guard is not None and guard.client.bundle == config.bundle and guard.client.state == "refused"


def fixed_changes(old: ServiceConfig, new: ServiceConfig) -> list[str]:
    """Keys that differ and that only a restart can change."""
    names = [name for name in FIXED if getattr(old, name) != getattr(new, name)]
    names += [f"dispatch.{name}" for name in DISPATCH_FIXED if getattr(old.dispatch, name) != getattr(new.dispatch, name)]
    names += [f"gateway.{name}" for name in GATEWAY_FIXED if getattr(old.gateway, name) != getattr(new.gateway, name)]
    return names + (["rollout.dir"] if old.rollout.dir != new.rollout.dir else [])


def live_changes(old: ServiceConfig, new: ServiceConfig) -> list[str]:
    """Keys that differ and that change while serving, but for the bundle."""
    names = [name for name in ("drain_s", "smaller_model") if getattr(old, name) != getattr(new, name)]
    for part in ("dispatch", "gateway"):
        before: Any = getattr(old, part)
        after: Any = getattr(new, part)
        names += [f"{part}.{field.name}" for field in fields(before) if getattr(before, field.name) != getattr(after, field.name)]
    for part in ("scheduler", "rollout"):
        before, after = getattr(old, part), getattr(new, part)
        names += [f"{part}.{name}" for name in type(before).model_fields if getattr(before, name) != getattr(after, name)]
    return names
