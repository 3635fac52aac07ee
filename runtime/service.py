"""The whole service out of its parts: backends by configuration, telemetry, policy, dispatcher; and what it says of itself."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from envs.decision.actions import Decision
from envs.decision.candidate_bounds import candidates_max
from envs.decision.circuit_breaker import State
from envs.domain.commands import CommandKind
from envs.domain.snapshot import BoolArray
from envs.scenario.cluster_spec import ClusterSpec
from runtime.backends.emulated import EmulatedBackend, rehearse
from runtime.backends.emulated_kernel import KernelSettings
from runtime.backends.group_messages import HostSettings
from runtime.backends.host_starts import HostStarts
from runtime.backends.interface import Backend
from runtime.backends.openai_http import OpenAiHttpBackend
from runtime.backends.torch_tp import TorchTpBackend
from runtime.calls import Call, Piece, Refusal
from runtime.gateway.interface import GroupStatus, ServedModel
from runtime.records.recorder import Recorder
from runtime.rollout.control import RolloutControl
from runtime.rollout.store import RolloutStore, configured_digest
from runtime.scheduling.agreement import Agreement
from runtime.scheduling.control_loop import DECISIONS, ControlLoop
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.policy_client import PolicyClient
from runtime.scheduling.policy_guard import PolicyGuard
from runtime.scheduling.telemetry import Telemetry
from runtime.service_config import GroupEntry, ServiceConfig

_STATES = {State.CLOSED: "serving", State.OPEN: "ejected", State.HALF_OPEN: "probing", State.FORCED_OPEN: "dead"}


def make_backend(config: ServiceConfig, g: int, settings: KernelSettings, starts: HostStarts) -> Backend:
    """The backend of group `g`, not started. starts: of the hosts of all groups of own ranks."""
    group, entry, limits = config.cluster.groups[g], config.groups[g], config.cluster.limits
    if entry.kind == "emulated":
        return EmulatedBackend(group, g, limits, settings)
    if entry.kind == "openai_http":
        assert entry.url is not None
        key = os.environ.get(entry.api_key_env, "") if entry.api_key_env else ""
        return OpenAiHttpBackend(group.name, g, entry.url, entry.remote_model or config.model_name, key)
    return TorchTpBackend(group.name, g, host_settings(config, entry, g), starts)


def host_settings(config: ServiceConfig, entry: GroupEntry, g: int) -> HostSettings:
    limits = config.cluster.limits
    assert config.model_path is not None and entry.ranks is not None
    tokens = limits.kv_blocks * limits.kv_block_tokens if limits.kv_blocks is not None else limits.max_running * limits.context_tokens
    return HostSettings(
        config.model_path, tuple(rank.model_dump() for rank in entry.ranks), tokens, limits.max_running, limits.queue_limit, entry.dtype
    )


def candidates_of(cluster: ClusterSpec, decision: Decision) -> int:
    """Most candidates that a decision can have on the cluster."""
    return candidates_max(decision, [len(group.ranks) for group in cluster.groups], sum(cluster.parked))


async def _let_go(guard: PolicyGuard) -> None:
    await asyncio.sleep(4 * guard.deadline_s)
    await guard.client.close()


async def _still_starting() -> AsyncIterator[Piece]:
    raise Refusal("starting", "the service is still starting its groups", retry_after_s=2.0)
    yield  # a generator, as the real one


class Service:
    """Implements the gateway's `Dispatcher` over the scheduling's."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        settings = KernelSettings()
        telemetry = Telemetry(config.cluster, settings, config.dispatch.limit_multiplier, config.dispatch.head_start_s)
        self._host_starts = HostStarts()
        backends = [make_backend(config, g, settings, self._host_starts) for g in range(len(config.cluster.groups))]
        store = RolloutStore(Path(config.rollout.dir)) if config.rollout.dir is not None else None
        bundle = config.bundle
        digest = self.bundle_digest = configured_digest(bundle)
        if store is not None and store.state.incumbent is not None and store.state.configured == self.bundle_digest:
            bundle, digest = store.state.incumbent.folder, store.state.incumbent.digest
        guard = self.make_guard(bundle, digest=digest) if bundle is not None else None
        self.dispatcher = Dispatcher(backends, telemetry, config.dispatch, guard)
        self.rollout = None
        if store is not None:
            self.rollout = RolloutControl(
                self.dispatcher, config.rollout, store, self.make_guard, self.use_guard, self.bundle_digest, config.bundle
            )
        guards = {
            name: self.make_guard(chosen, name, config.control.deadline_s)
            for name in DECISIONS
            if (chosen := config.bundle_of(name)) is not None
        }
        self.control = ControlLoop(self.dispatcher, config.control, guards)
        self.recorder = Recorder(self.dispatcher, config.records, config.model_name) if config.records.dir is not None else None
        self._leaving: set[asyncio.Task[None]] = set()
        self.has_started = False
        self._tokens_max = self._least_tokens(telemetry)
        # without ranks of our own, which want token ids, prompts go as they came
        is_foreign = all(entry.kind != "torch_tp" for entry in config.groups)
        model = ServedModel(config.model_name, self._tokens_max, None if is_foreign else config.model_path, int(time.time()))
        self._models = {config.model_name: model}

    def _least_tokens(self, telemetry: Telemetry) -> int:
        return min(self.config.cluster.limits.context_tokens, int(telemetry.kv_tokens.max(initial=1)))

    async def start(self) -> None:
        """Returns when the first group can serve."""
        if self.recorder is not None:
            self.recorder.start()
        kinds = [entry.kind for entry, is_parked in zip(self.config.groups, self.config.cluster.parked, strict=True) if not is_parked]
        if "torch_tp" in kinds:
            self._host_starts.begin()
            await asyncio.sleep(0)  # it imports while the kernels are loaded, which holds the loop
        self._load_kernels()
        await self.dispatcher.start()
        await self.control.start()
        if self.rollout is not None:
            await self.rollout.start()
        self.has_started = True

    def _load_kernels(self) -> None:
        """All compiled code that serving will need; what compiles it is given back afterwards (`runtime.process_memory`)."""
        self.dispatcher.load_kernels()
        self.control.rehearse()
        emulated = [g for g, entry in enumerate(self.config.groups) if entry.kind == "emulated"]
        if emulated:
            rehearse(self.config.cluster.groups[emulated[0]], self.config.cluster.limits)

    async def close(self) -> None:
        if self.rollout is not None:
            await self.rollout.close()
        await self.control.close()
        await self.dispatcher.close()
        await self._host_starts.close()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)

    def make_guard(self, bundle: str, decision: Decision = "route", deadline_s: float | None = None, digest: str = "") -> PolicyGuard:
        """A policy process for `bundle`, not started, behind the configured guard rails. deadline_s: None, that of route decisions. digest:
        of the files that it shall load, "" as they are when it starts."""
        scheduler = self.config.scheduler
        client = PolicyClient(bundle, candidates_of(self.config.cluster, decision), decision=decision, digest=digest)
        agreement = Agreement(scheduler.agreement_min, scheduler.agreement_max) if decision == "route" else None
        within_s = scheduler.deadline_ms / 1000.0 if deadline_s is None else deadline_s
        return PolicyGuard(client, within_s, scheduler.outside_max, rng=np.random.default_rng(), agreement=agreement)

    async def use_guard(self, guard: PolicyGuard | None) -> None:
        """From now on `guard`'s policy decides; None: the service file's, or the heuristic. The one before is let go when its last answers
        are in."""
        scheduler = self.dispatcher.scheduler
        if guard is None and self.config.bundle is not None:
            guard = self.make_guard(self.config.bundle, digest=self.bundle_digest)
            await guard.client.start()
        before, scheduler.guard = scheduler.guard, guard
        self._dismiss(before)

    def use_control_guard(self, decision: Decision, guard: PolicyGuard) -> None:
        """The same for a split or rebalance policy."""
        decider = self.control.deciders[decision]
        before, decider.guard = decider.guard, guard
        self._dismiss(before)

    def _dismiss(self, guard: PolicyGuard | None) -> None:
        if guard is not None:
            task = asyncio.create_task(_let_go(guard))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def run(self, call: Call) -> AsyncIterator[Piece]:
        """Raises, when iterated: Refusal."""
        return self.dispatcher.run(call) if self.has_started else _still_starting()

    def models(self) -> Mapping[str, ServedModel]:
        return self._models

    async def is_ready(self) -> bool:
        return self.has_started and await self.dispatcher.is_ready()

    def status(self) -> Sequence[GroupStatus]:
        dispatcher = self.dispatcher
        telemetry, allows, alive = dispatcher.telemetry, dispatcher.panel.allows(), dispatcher.groups.alive()
        return [self._status_of(g, bool(allows[g]), alive, telemetry) for g in range(len(dispatcher.backends))]

    def _status_of(self, g: int, is_allowed: bool, alive: BoolArray, telemetry: Telemetry) -> GroupStatus:
        backend, breaker, report = self.dispatcher.backends[g], self.dispatcher.panel.breakers[g], telemetry.reports[g]
        state, detail, move = _STATES[breaker.state], breaker.reason, self.control.moves.under_way.get(g)
        if why_gone := self.control.moves.why_gone(g):
            state, detail = "joined", why_gone
        elif telemetry.is_parked[g]:
            is_starting = move is not None and move.command.kind is CommandKind.SCALE_OUT
            state, detail = ("starting", "switched on") if is_starting else ("parked", "switched off")
        elif not alive[g] and self.dispatcher.groups.is_returning[g]:
            state, detail = "starting", "with other ranks"
        elif not alive[g]:
            state = "dead" if self.has_started or detail else "starting"
        elif telemetry.is_draining[g]:
            state = "drained" if self.control.moves.is_drained(g) else "draining"
        if (wait_s := breaker.next_probe_s) is not None:
            detail = f"{detail}; next probe in {wait_s:.1f} s"
        if backend.is_emulation:
            detail = f"EMULATION; {detail}" if detail else "EMULATION"
        used = None
        if report is not None and report.kv_blocks_total and report.kv_blocks_free is not None:
            used = 1.0 - report.kv_blocks_free / report.kv_blocks_total
        elif report is not None:
            used = report.kv_used_fraction
        flights = telemetry.flights
        # another engine's are on its own metrics page
        is_foreign = self.config.groups[g].kind == "openai_http"
        counts = (None,) * 3 if is_foreign else self.dispatcher.engine_counts[g].tolist()
        return GroupStatus(
            backend.name, self.config.model_name, bool(alive[g]) and is_allowed and not telemetry.is_draining[g], state, detail,
            len(flights.running[g]), len(flights.waiting[g]), used, *counts,
        )  # fmt: skip
