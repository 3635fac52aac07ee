"""The service's inside as plain data, for `/admin/state`: docs/admin_state.md words it. Read only, made when asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from envs.decision.overload import FRESH_S
from envs.decision.split_planner import CORNERS
from envs.domain.commands import CommandKind
from envs.domain.requests import SERVICE_CLASSES
from envs.domain.snapshot import ClusterSnapshot
from envs.perf_model import memory_fit
from runtime.backends.interface import GroupReport
from runtime.breaker_told import breaker_told
from runtime.scheduling.control_loop import ControlLoop
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.move import FOREIGN, Move
from runtime.scheduling.policy_guard import PolicyGuard
from runtime.scheduling.recent_decisions import finite, name_of

GROUP_COMMANDS = (
    CommandKind.SET_SPLIT, CommandKind.REQUEUE, CommandKind.MIGRATE, CommandKind.SCALE_OUT, CommandKind.SCALE_IN, CommandKind.FALL_BACK,
    CommandKind.RESTORE, CommandKind.REGROUP,
)  # fmt: skip

ALWAYS_COUNTED = ("retries", "attempts_lost", "busy", "groups_lost", "moved_calls", "moved_calls_copied", "requeued_calls", "degraded")


def state_of(
    dispatcher: Dispatcher, control: ControlLoop, kinds: Sequence[str], states: Sequence[tuple[str, str]], bundles: Mapping[str, str | None]
) -> dict[str, Any]:
    """Everything but the service's own line. kinds, states (state, detail): of the groups; bundles: by decision, where there is one."""
    names = [backend.name for backend in dispatcher.backends]
    view, debt_s = dispatcher.view(), control.discipline.debt_s()
    settings = control.settings
    guards = {"route": dispatcher.scheduler.guard} | {name: decider.guard for name, decider in control.deciders.items()}
    counts = {"route": dispatcher.scheduler.counts} | {name: decider.counts for name, decider in control.deciders.items()}
    heuristics = {"route": dispatcher.settings.heuristic, "split": settings.split, "rebalance": settings.rebalance}
    decisions = dispatcher.scheduler.recent.told(names) + control.recent.told(names)
    return {
        "groups": [
            _group(dispatcher, view, g, kinds[g], states[g], float(debt_s[g]), control.moves.why_gone(g)) for g in range(len(names))
        ],
        "moves": [move_told(move, names) for move in control.moves.log],
        "moves_under_way": [move_told(move, names) for move in dict.fromkeys(control.moves.under_way.values())],
        "decisions": sorted(decisions, key=lambda said: -said["at_s"])[:64],
        "class_breakers": [
            {"service_class": service.name, **breaker_told(breaker, view.now_s)}
            for service, breaker in zip(SERVICE_CLASSES, dispatcher.class_breaker.breakers, strict=True)
        ],
        "overload": _overload(dispatcher),
        "deciders": {name: _decider(bundles.get(name), guards[name], heuristics[name], counts[name], view.now_s) for name in heuristics},
        "control": {
            "is_on": settings.is_on,
            "tick_s": settings.tick_s,
            "ticks": control.ticks,
            "last_tick_at_s": control.last_tick_at_s,
            "next_tick_s": control.next_tick_s(),
            "budget_fraction": settings.budget_fraction,
        },
        "counters": dict.fromkeys(ALWAYS_COUNTED, 0) | dict(dispatcher.counts),
    }  # fmt: skip


def _overload(dispatcher: Dispatcher) -> dict[str, Any]:
    overload, is_fresh = dispatcher.overload, dispatcher.view().now_s - dispatcher.overload.at_s <= FRESH_S
    return {
        "sheds": overload.sheds,
        "classes": [
            {
                "service_class": service.name,
                "pressure": finite(overload.pressure[c]) if is_fresh else None,
                "shed": overload.shed[c],
            }
            for c, service in enumerate(SERVICE_CLASSES)
        ],
        "levels": [
            {"priority": priority, "service_class": SERVICE_CLASSES[c].name, "is_tight": is_tight}
            for priority, c, is_tight in overload.levels()
        ],
    }


def move_told(move: Move, names: Sequence[str]) -> dict[str, Any]:
    command = move.command
    return {
        "at_s": move.at_s,
        "kind": command.kind.name.lower(),
        "group": name_of(names, command.group_index),
        "target": name_of(names, command.target_index),
        "detail": move.detail,
        "source": move.source,
        "reason": move.reason,
        "price_s": move.price_s,
        "took_s": move.took_s,
        "paused_s": move.paused_s,
        "calls": move.calls,
        "outcome": move.outcome,
        "error": move.error,
    }


def plan_told(dispatcher: Dispatcher, g: int) -> dict[str, Any] | None:
    """The plan in force, as the group reports it or else as it is believed to be; None of a foreign group, and of one that is no more."""
    if CommandKind.SET_SPLIT not in dispatcher.backends[g].can or g in dispatcher.telemetry.joined:
        return None
    plan, report = dispatcher.plans.plans[g], dispatcher.telemetry.reports[g]
    corner = dispatcher.telemetry.corner(g)
    said = None if report is None else report.plan
    heads = list(plan.query_heads) if said is None else [round(width, 1) for width in said.query_heads]
    columns = [blocks * plan.mlp_block for blocks in plan.mlp_blocks] if said is None else [round(width, 1) for width in said.mlp_columns]
    return {
        "version": 0 if said is None else said.version,
        "corner": CORNERS[corner] if 0 <= corner < len(CORNERS) else None,
        "query_heads": heads,
        "mlp_columns": columns,
        "vocabulary_rows": list(plan.vocabulary_rows if said is None else said.vocabulary_rows),
        "shares": [width / max(1e-9, sum(columns)) for width in columns],
        "is_moving": said is not None and said.is_moving,
    }


def _decider(
    bundle: str | None, guard: PolicyGuard | None, heuristic: str, counts: Mapping[tuple[str, str], int], now_s: float
) -> dict[str, Any]:
    return {
        "policy": bundle,
        "policy_state": None if guard is None else guard.client.state,
        "policy_detail": "" if guard is None else guard.client.detail,
        "breaker": None if guard is None else breaker_told(guard.breaker, now_s),
        "heuristic": heuristic,
        "counts": [{"source": source, "cause": cause, "count": count} for (source, cause), count in counts.items()],
    }


def _group(
    dispatcher: Dispatcher, view: ClusterSnapshot, g: int, kind: str, state: tuple[str, str], debt_s: float, why_gone: str
) -> dict[str, Any]:
    backend, telemetry = dispatcher.backends[g], dispatcher.telemetry
    report, rates = telemetry.reports[g], dispatcher.plans.rates[g]
    can = [command for command in GROUP_COMMANDS if not why_gone and (command in backend.can or command is CommandKind.REQUEUE)]
    cannot = {command.name.lower(): why_gone or FOREIGN for command in GROUP_COMMANDS if command not in can}
    return {
        "name": backend.name,
        "kind": kind,
        "is_emulation": backend.is_emulation,
        "state": state[0],
        "detail": state[1],
        "accepts": bool(view.accepts[g]),
        "can": [command.name.lower() for command in can],
        "cannot": cannot,
        "running": int(view.running[g]),
        "waiting": int(view.waiting[g]),
        "running_limit": int(view.running_limit[g]),
        "queue_limit": int(view.queue_limit[g]),
        "attempts": int(dispatcher.served[g]),
        "kv": _kv(view, g, report, is_declared=bool(backend.can) and not why_gone),
        "report_age_s": float(view.report_age_s[g]) if report is not None else None,
        "step_s": float(view.step_s[g]) or None,
        "step_ratio": float(view.correction[g]),
        "pause_left_s": float(view.pause_left_s[g]),
        "effective_compute_share": None if rates is None else finite(rates.compute.max(initial=0.0)),
        "memory_bytes_per_s": None if rates is None else finite(rates.bytes_per_s),
        "plan": plan_told(dispatcher, g),
        "move_debt_s": debt_s,
        "breaker": breaker_told(dispatcher.panel.breakers[g], view.now_s),
        "ranks": [] if why_gone else _ranks(dispatcher, view, g),
    }


def _kv(view: ClusterSnapshot, g: int, report: GroupReport | None, is_declared: bool) -> dict[str, Any]:
    """Of a foreign group (not is_declared) only what it tells: its declared memory is a guess."""
    total = int(view.kv_blocks_total[g])
    used = total - int(view.kv_blocks_free[g])
    is_told = is_declared or (report is not None and (report.kv_blocks_total is not None or report.kv_used_fraction is not None))
    return {
        "tokens_total": total * view.kv_block_tokens if is_told else None,
        "tokens_used": used * view.kv_block_tokens if is_told else None,
        "used_fraction": used / max(1, total) if is_told else None,
    }


def _ranks(dispatcher: Dispatcher, view: ClusterSnapshot, g: int) -> list[dict[str, Any]]:
    telemetry, plans = dispatcher.telemetry, dispatcher.plans
    group, rates = telemetry.groups[g], plans.rates[g]
    members, speed = plans.members(g), plans.speed_factors(g)
    weights = memory_fit.weight_bytes(group.model, plans.plans[g])
    kv_bytes = memory_fit.kv_bytes_per_token(group.model, plans.plans[g])
    told = []
    for r, place in enumerate(group.ranks):
        gpu, ratio = place.gpu, telemetry.ranks.ratio[g, r]
        told.append(
            {
                "rank": r,
                "gpu": gpu.name,
                "node": place.node,
                "is_member": bool(members[r]),
                "declared": {
                    "flop_per_s": gpu.flop_per_s, "memory_bytes_per_s": gpu.memory_bytes_per_s, "memory_bytes": gpu.memory_bytes,
                },
                "speed_factor": float(speed[r]),
                "time_ratio": {"attention": float(ratio[0]), "mlp": float(ratio[1])},
                "time_ratio_std": float(view.correction_std[g]),
                "busy_fraction": float(view.rank_busy_fraction[g, r]),
                "compute_share": None if rates is None else finite(rates.compute[r]),
                "memory_stall_share": None if rates is None else finite(rates.stall[r]),
                "kv_bytes_per_token": float(kv_bytes[r]),
                "weight_bytes": float(weights[r]),
            }
        )  # fmt: skip
    return told


def stamped(said: dict[str, Any], service: dict[str, Any]) -> dict[str, Any]:
    """The whole answer."""
    return {"at_s": time.time(), "service": service, **said}
