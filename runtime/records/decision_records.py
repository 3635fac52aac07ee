"""One line per route decision, with all that another policy needs to be asked the same question later; and their reader.

The first line of a file says what the numbers mean (`DecisionHead`). Arrays are little-endian float32 in base64.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from envs.decision import predictor as P
from envs.decision.observation import CONTEXT, FEATURES, OBSERVATION_VERSION
from envs.domain.commands import CommandKind
from envs.domain.requests import SERVICE_CLASSES
from runtime.scheduling.online_scheduler import Made

FORMAT_VERSION = 1


class RecordError(ValueError):
    """A record cannot be read; one line: file, line, what is wrong."""


class DecisionHead(msgspec.Struct, frozen=True):
    """groups: names, in the order of the route candidates; then come hold and refuse. started_unix_s: zero of `at_s`."""

    ballast_decisions: int
    observation_version: int
    features: list[str]
    context: list[str]
    groups: list[str]
    started_unix_s: float


class DecisionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One decision. at_s: since the run's start. request: the number that links decisions of one call. mask: "1" for an allowed candidate.
    chosen: the candidate that was followed. source, cause: who chose it and why not the policy. arm: of a rollout. took_s: the whole
    decision. expected_ttft_s, expected_tpot_s: predicted, where a group was chosen. utility: predicted utility of each group. scores: the
    policy's, None for a candidate that was not allowed. has_smaller: it was refused, and where that was
    for pressure the smaller model was next. candidates (C x F), context (K): the observation."""

    at_s: float
    request: int
    service_class: str
    prompt_tokens: int
    attempt: int
    mask: str
    chosen: int
    command: str
    source: str
    took_s: float
    cause: str = ""
    arm: str = ""
    has_smaller: bool = False
    expected_ttft_s: float | None = None
    expected_tpot_s: float | None = None
    utility: list[float] | None = None
    scores: list[float | None] | None = None
    candidates: str | None = None
    context: str | None = None

    @property
    def allowed(self) -> np.ndarray:
        return np.array([letter == "1" for letter in self.mask], np.bool_)

    def observation(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Candidates (C, F) and context (K,), float32; None where they were not recorded."""
        if self.candidates is None or self.context is None:
            return None
        rows = np.frombuffer(base64.b64decode(self.candidates), "<f4").reshape(len(self.mask), -1)
        return rows, np.frombuffer(base64.b64decode(self.context), "<f4")


@dataclass(frozen=True, slots=True)
class DecisionFacts:
    """A decision until it is written: arrays of its own moment, no snapshot. utility (groups,)."""

    at_s: float
    request: int
    class_index: int
    prompt_tokens: int
    attempt: int
    mask: np.ndarray
    chosen: int
    command: str
    source: str
    cause: str
    arm: str
    has_smaller: bool
    took_s: float
    expected_s: tuple[float, float] | None
    utility: np.ndarray | None
    scores: np.ndarray | None
    observation: tuple[np.ndarray, np.ndarray] | None


def head_line(groups: list[str], started_unix_s: float) -> str:
    head = DecisionHead(FORMAT_VERSION, OBSERVATION_VERSION, list(FEATURES), list(CONTEXT), groups, started_unix_s)
    return msgspec.json.encode(head).decode()


def facts_of(made: Made, at_s: float, arm: str, has_observation: bool) -> DecisionFacts:
    request, decided, point = made.question.request, made.decided, made.point
    observation = made.observation if has_observation else None
    has_smaller = made.question.has_smaller and decided.command.kind is CommandKind.REFUSE
    estimates = point.estimates if observation is not None else None
    return DecisionFacts(
        at_s, request.request_id, request.class_index, request.prompt_tokens, request.attempts, point.mask, decided.index,
        decided.command.kind.name.lower(), decided.source, decided.cause, arm, has_smaller, decided.took_s, decided.expected_s,
        estimates[:, P.E_UTILITY] if estimates is not None else None, made.scores, observation,
    )  # fmt: skip


def line_of(facts: DecisionFacts) -> str:
    expected = facts.expected_s or (None, None)
    rows, context = facts.observation if facts.observation is not None else (None, None)
    record = DecisionRecord(
        at_s=round(facts.at_s, 6),
        request=facts.request,
        service_class=SERVICE_CLASSES[facts.class_index].name,
        prompt_tokens=facts.prompt_tokens,
        attempt=facts.attempt,
        mask="".join("1" if allowed else "0" for allowed in facts.mask),
        chosen=facts.chosen,
        command=facts.command,
        source=facts.source,
        took_s=round(facts.took_s, 9),
        cause=facts.cause,
        arm=facts.arm,
        has_smaller=facts.has_smaller,
        expected_ttft_s=expected[0],
        expected_tpot_s=expected[1],
        utility=facts.utility.tolist() if facts.utility is not None else None,
        scores=[score if math.isfinite(score) else None for score in facts.scores.tolist()] if facts.scores is not None else None,
        candidates=_text(rows),
        context=_text(context),
    )
    return msgspec.json.encode(record).decode()


def _text(array: np.ndarray | None) -> str | None:
    return None if array is None else base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()


class DecisionFile:
    """The decisions of one file: `head`, then iterate, once. `torn`: 1 when the last line was left unfinished, and left out."""

    def __init__(self, path: Path) -> None:
        """Raises: RecordError when it is no such file."""
        self.path, self.torn = path, 0
        try:
            with path.open("rb") as file:
                self.head = msgspec.json.decode(file.readline(), type=DecisionHead)
        except (OSError, msgspec.MsgspecError) as error:
            raise RecordError(f"{path}: not a file of decision records ({error})") from error
        if self.head.ballast_decisions != FORMAT_VERSION:
            raise RecordError(f"{path}: ballast_decisions={self.head.ballast_decisions}; this program reads {FORMAT_VERSION}")

    def __iter__(self) -> Iterator[DecisionRecord]:
        """Raises: RecordError naming the line."""
        decoder = msgspec.json.Decoder(DecisionRecord)
        with self.path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, start=2):
                try:
                    record = decoder.decode(line)
                    self._check(record)
                except (msgspec.MsgspecError, ValueError) as error:
                    if not line.endswith(b"\n"):
                        self.torn += 1
                        return
                    raise RecordError(f"{self.path}, line {number}: not a decision record ({error})") from error
                yield record

    def _check(self, record: DecisionRecord) -> None:
        """Raises: ValueError for a record that contradicts itself or the head."""
        count = len(self.head.groups) + 2
        if len(record.mask) != count or set(record.mask) - {"0", "1"}:
            raise ValueError(f"mask {record.mask[:40]!r} must be {count} times 0 or 1")
        if not (0 <= record.chosen < count and record.mask[record.chosen] == "1"):
            raise ValueError(f"chosen={record.chosen} is not an allowed candidate")
        if record.service_class not in {service.name for service in SERVICE_CLASSES}:
            raise ValueError(f"service_class={record.service_class!r} unknown")
        if record.scores is not None and len(record.scores) != count:
            raise ValueError(f"{len(record.scores)} scores for {count} candidates")
        observation = record.observation()
        if observation is not None:
            rows, context = observation
            if rows.shape[1] != len(self.head.features) or len(context) != len(self.head.context):
                raise ValueError(f"observation of {rows.shape[1]} and {len(context)} values; the head names others")
            if not (np.isfinite(rows).all() and np.isfinite(context).all()):
                raise ValueError("an observation's value is not finite")
