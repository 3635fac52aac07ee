"""A circuit breaker as plain data, for `/admin/state`."""

from __future__ import annotations

from typing import Any

from envs.decision.circuit_breaker import CircuitBreaker, State


def breaker_told(breaker: CircuitBreaker, now_s: float) -> dict[str, Any]:
    return {
        "state": breaker.state.name.lower(),
        "reason": breaker.reason if breaker.state is not State.CLOSED else "",
        "next_probe_s": breaker.next_probe_s,
        "pause_left_s": max(0.0, breaker.pause_until_s - now_s),
    }
