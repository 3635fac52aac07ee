"""Where a rollout stands, and the moves between its stages. Pure values: who may move, and when, is the gates' and the operator's business.

idle -> shadow -> canary 0 ... canary n-1 -> adopted         any of them -> rolled_back
"""

from __future__ import annotations

from typing import Any

import msgspec

STAGES = ("idle", "shadow", "canary", "adopted", "rolled_back")
ACTIVE = ("shadow", "canary")
FORMAT_VERSION = 1


class RolloutError(ValueError):
    """A move that cannot be made, or a state that cannot be read; one line."""


class InconsistentState(ValueError):
    """What a state says is not possible; one line."""


class BundleName(msgspec.Struct, frozen=True):
    """A bundle: folder of our own copy, where it was taken from, digest of its files."""

    folder: str
    origin: str
    digest: str


class RolloutState(msgspec.Struct, frozen=True):
    """format_version: of this file. sequence: number of the last move. stage, step: of canary stages, from 0. candidate: who is tried, or
    was last. incumbent: who decides beside it; None: the configured heuristic or bundle. previous: the incumbent before an adoption.
    configured: digest of the service file's bundle when `incumbent` was adopted ("" for none): another one there overrules it. salt: of
    who meets the candidate. since_unix_s: of the stage. evidence: summary of the replay gate. stats: the stage's counts as far as they
    were put down. pairs_begun: pairs of slices of this rollout so far. entry: the audit log's last line, kept here until it is surely
    there."""

    format_version: int = FORMAT_VERSION
    sequence: int = 0
    stage: str = "idle"
    step: int = 0
    candidate: BundleName | None = None
    incumbent: BundleName | None = None
    previous: BundleName | None = None
    configured: str = ""
    salt: str = ""
    since_unix_s: float = 0.0
    reason: str = ""
    evidence: dict[str, Any] = {}
    stats: dict[str, Any] = {}
    pairs_begun: int = 0
    entry: str = ""

    def check(self) -> None:
        """Raises: InconsistentState; no program of ours wrote that."""
        if self.stage not in STAGES:
            raise InconsistentState(f"stage={self.stage!r}; known: {', '.join(STAGES)}")
        if self.candidate is None and (self.is_active or self.stage == "adopted"):
            raise InconsistentState(f"stage {self.stage} without a candidate")
        if min(self.step, self.sequence, self.pairs_begun) < 0:
            raise InconsistentState(f"step={self.step}, sequence={self.sequence}, pairs_begun={self.pairs_begun}: none may be below 0")

    @property
    def is_active(self) -> bool:
        return self.stage in ACTIVE

    @property
    def title(self) -> str:
        return f"canary {self.step + 1}" if self.stage == "canary" else self.stage


def begun(
    state: RolloutState, candidate: BundleName, configured: str, salt: str, evidence: dict[str, Any], now_unix_s: float
) -> RolloutState:
    """The replay gate was passed: the candidate decides in shadow. Raises: RolloutError while another rollout is under way."""
    if state.is_active:
        assert state.candidate is not None
        raise RolloutError(
            f"a rollout of {state.candidate.origin} is under way ({state.title}); promote it to its end or roll it back first"
        )
    if state.incumbent is not None and state.incumbent.digest == candidate.digest:
        raise RolloutError(f"{candidate.origin} is what decides already")
    return msgspec.structs.replace(
        state, stage="shadow", step=0, candidate=candidate, configured=configured, salt=salt, since_unix_s=now_unix_s, reason="",
        evidence=evidence, stats={}, pairs_begun=0,
    )  # fmt: skip


def promoted(state: RolloutState, canary_stages: int, reason: str, now_unix_s: float) -> RolloutState:
    """One stage on. Raises: RolloutError where there is none."""
    if not state.is_active:
        raise RolloutError(f"nothing to promote: the stage is {state.title}; begin with `rollout start`")
    moved: dict[str, Any] = {"since_unix_s": now_unix_s, "reason": reason, "stats": {}}
    if state.stage == "shadow":
        moved |= {"stage": "canary", "step": 0}
    elif state.step + 1 < canary_stages:
        moved |= {"step": state.step + 1}
    else:
        moved |= {"stage": "adopted", "step": 0, "incumbent": state.candidate, "previous": state.incumbent}
    return msgspec.structs.replace(state, **moved)


def rolled_back(state: RolloutState, reason: str, now_unix_s: float) -> RolloutState:
    """The incumbent decides alone; an adopted candidate gives way to the incumbent before it. Raises: RolloutError without a candidate."""
    if state.stage not in (*ACTIVE, "adopted"):
        raise RolloutError(f"nothing to roll back: the stage is {state.title}")
    incumbent = state.previous if state.stage == "adopted" else state.incumbent
    return msgspec.structs.replace(
        state, stage="rolled_back", step=0, incumbent=incumbent, previous=None, since_unix_s=now_unix_s, reason=reason, stats={}
    )
