"""A rollout in words and numbers, from its state and its audit log alone: what is said whether a service runs or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from runtime.rollout.settings import RolloutEntry
from runtime.rollout.state import RolloutState
from runtime.rollout.store import audit_tail

AUDIT_SHOWN = 20


def describe(state: RolloutState, settings: RolloutEntry, incumbent: str | Path) -> dict[str, Any]:
    """What the state alone says."""
    kind = "heuristic" if isinstance(incumbent, str) else "bundle"
    return {
        "stage": state.stage,
        "step": state.step,
        "title": state.title,
        "stages": ["shadow", *(f"canary {gate.share:.0%}" for gate in settings.canary), "adopted"],
        "share": settings.canary[state.step].share if state.stage == "canary" and state.step < len(settings.canary) else None,
        "candidate": msgspec.to_builtins(state.candidate),
        "incumbent": {"kind": kind, "name": str(incumbent)},
        "since_unix_s": state.since_unix_s or None,
        "reason": state.reason,
        "evidence": state.evidence,
        "is_automatic": settings.automatic,
        "gates": [],
        "next_move": "wait",
        "next_step": "",
        "policy": None,
    }


def audit_shown(folder: Path) -> list[dict[str, Any]]:
    """The last entries of the audit log, newest first."""
    entries = []
    for line in reversed(audit_tail(folder, AUDIT_SHOWN)):
        try:
            entries.append({name: value for name, value in msgspec.json.decode(line).items() if name not in ("gates", "previous")})
        except (msgspec.DecodeError, AttributeError):
            continue  # a line that a kill left unfinished
    return entries
