"""The last decisions, with what they were made from: a bounded ring. Taking one in costs an append; it is put into words when somebody
looks."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from agents.heuristics.controlling import AFFECTED, GAIN, PRICE
from envs.decision import predictor as P
from envs.decision.actions import Decision, DecisionPoint
from envs.decision.split_planner import CORNERS
from envs.domain.commands import Command, CommandKind
from envs.domain.requests import SERVICE_CLASSES, Request
from envs.domain.snapshot import BoolArray, FloatArray

KEPT = 64
ESTIMATES = (
    ("ttft_s", P.E_TTFT_S), ("tpot_s", P.E_TPOT_S), ("completion_s", P.E_COMPLETION_S), ("own_utility", P.E_OWN),
    ("resident_harm", P.E_HARM),
)  # fmt: skip


class _Seen(msgspec.Struct, frozen=True, eq=False):
    """What is kept of a decision: not its view, which holds every call in flight."""

    at_s: float
    decision: Decision
    commands: tuple[Command, ...]
    mask: BoolArray
    estimates: FloatArray | None
    moves: FloatArray | None
    request: Request | None
    chosen: int
    source: str
    cause: str
    took_s: float
    why_not: Sequence[str]
    scores: bytes


class RecentDecisions:
    """`note` each decision; `told` gives them newest first."""

    def __init__(self, kept: int = KEPT) -> None:
        self._seen: deque[_Seen] = deque(maxlen=kept)

    def note(
        self,
        point: DecisionPoint,
        mask: BoolArray,
        chosen: int,
        source: str,
        cause: str,
        took_s: float,
        why_not: Sequence[str] = (),
        scores: bytes = b"",
    ) -> None:
        """why_not: of each candidate, "" where it was allowed. scores: the policy's, float32, where it tells them."""
        estimates = point.__dict__.get("estimates")  # only if somebody asked for them
        self._seen.appendleft(
            _Seen(
                time.time(),
                point.decision,
                point.commands,
                mask,
                estimates,
                point.moves,
                point.request,
                chosen,
                source,
                cause,
                took_s,
                why_not,
                scores,
            )
        )

    def told(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """As docs/admin_state.md words them; names: of the groups."""
        return [_decision(seen, names) for seen in self._seen]


def _decision(seen: _Seen, names: Sequence[str]) -> dict[str, Any]:
    request = seen.request
    return {
        "at_s": seen.at_s,
        "decision": seen.decision,
        "source": seen.source,
        "cause": seen.cause,
        "took_s": seen.took_s,
        "chosen": seen.chosen,
        "request": None
        if request is None
        else {
            "service_class": SERVICE_CLASSES[request.class_index].name,
            "prompt_tokens": request.prompt_tokens,
            "attempts": request.attempts,
        },
        "candidates": [_candidate(seen, index, names) for index in range(len(seen.commands))],
    }


def _candidate(seen: _Seen, index: int, names: Sequence[str]) -> dict[str, Any]:
    command = seen.commands[index]
    found: dict[str, Any] = {
        "kind": command.kind.name.lower(),
        "group": name_of(names, command.group_index),
        "is_allowed": bool(seen.mask[index]),
        "score": _score(seen.scores, index),
    }
    if seen.decision == "route":
        return found | _estimates(seen.estimates, command)
    moves = seen.moves
    found["target"] = name_of(names, command.target_index)
    found["detail"] = CORNERS[command.argument] if command.kind is CommandKind.SET_SPLIT else ""
    found["why_not"] = seen.why_not[index] if index < len(seen.why_not) else ""
    found["log_speed_up"] = None if moves is None else float(moves[index, GAIN])
    found["price_s"] = None if moves is None else math.expm1(float(moves[index, PRICE]))
    found["affected_calls"] = None if moves is None else round(math.expm1(float(moves[index, AFFECTED])))
    return found


def _score(scores: bytes, index: int) -> float | None:
    told = np.frombuffer(scores, np.float32)
    return finite(told[index]) if index < len(told) else None


def _estimates(estimates: FloatArray | None, command: Command) -> dict[str, float | None]:
    if estimates is None or command.kind is not CommandKind.ROUTE:
        return dict.fromkeys([name for name, _ in ESTIMATES] + ["net_utility"])
    row = estimates[command.group_index]
    found = {name: finite(row[column]) for name, column in ESTIMATES}
    found["net_utility"] = finite(row[P.E_OWN] + row[P.E_HARM])
    return found


def finite(value: float | np.floating[Any] | None) -> float | None:
    """As JSON can carry it."""
    return float(value) if value is not None and math.isfinite(value) else None


def name_of(names: Sequence[str], g: int) -> str | None:
    return names[g] if 0 <= g < len(names) else None
