"""One line per request, in the traces' own format: what came, and what became of it. Traces of a service can be replayed as they are.

Sessions, users and prompt blocks go in as keyed digests, the key being this run's and nowhere kept: equal ones are equal, and that is all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envs.domain.requests import SERVICE_CLASSES
from envs.traces.formats.ballast import row_line
from envs.traces.trace_row import TraceRow
from runtime.scheduling.call_ledger import CallAccount
from runtime.scheduling.prefix_memory import BLOCK_TOKENS, block_keys

DIGITS = 6


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is kept of an account until it is written; the call itself, with its prompt, is let go. Times in s."""

    call_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    output_limit: int
    class_index: int
    priority: int
    session: str | None
    user: str | None
    keys: Sequence[int]
    prompt_ids: Sequence[int]
    end: str
    arm: str
    attempts: int
    group: str | None
    source: str
    cause: str
    degraded: str
    expected_s: tuple[float, float] | None
    ttft_s: float
    tpot_s: float
    finish_s: float


def facts_of(account: CallAccount, started_s: float, has_prompt: bool) -> RequestFacts:
    """started_s: zero of the times written, on the monotonic clock."""
    call, last = account.call, account.last
    group, source, cause, expected_s = (last.group, last.source, last.cause, last.expected_s) if last is not None else (None, "", "", None)
    return RequestFacts(
        call.call_id, account.arrival_s - started_s, call.prompt_tokens, account.tokens, call.max_tokens, call.class_index, call.priority,
        call.session, call.user, block_keys(call.prompt_ids), call.prompt_ids if has_prompt else (), account.end, account.arm,
        account.attempts, group, source, cause, call.notes.degraded, expected_s, account.ttft_s,
        account.tpot_s if account.tokens else math.nan, account.last_s - account.arrival_s,
    )  # fmt: skip


class RequestLines:
    """`line` of each request's facts. key: of the digests, at most 64 bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def line(self, facts: RequestFacts) -> str:
        blocks = tuple(self._number(key) for key in facts.keys)
        return row_line(
            TraceRow(
                round(facts.arrival_s, DIGITS), facts.prompt_tokens, facts.output_tokens, SERVICE_CLASSES[facts.class_index].name,
                facts.priority, self._name(facts.session), blocks, BLOCK_TOKENS if blocks else 0, facts.output_limit, self._extra(facts),
            )
        )  # fmt: skip

    def _extra(self, facts: RequestFacts) -> dict[str, Any]:
        expected = facts.expected_s or (math.nan, math.nan)
        extra: dict[str, Any] = {
            "request": facts.call_id, "end": facts.end, "user": self._name(facts.user), "group": facts.group, "attempts": facts.attempts,
            "source": facts.source, "cause": facts.cause, "degraded": facts.degraded, "arm": facts.arm,
            "prompt_ids": list(facts.prompt_ids),
        }  # fmt: skip
        times = {
            "ttft_s": facts.ttft_s, "tpot_s": facts.tpot_s, "e2e_s": facts.finish_s, "expected_ttft_s": expected[0],
            "expected_tpot_s": expected[1],
        }  # fmt: skip
        extra |= {name: round(value, DIGITS) for name, value in times.items() if math.isfinite(value)}
        return {name: value for name, value in extra.items() if value not in (None, "", [])}

    def _name(self, text: str | None) -> str | None:
        return None if text is None else hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8, key=self._key).hexdigest()

    def _number(self, key: int) -> int:
        """53 bits, which every reader of JSON keeps."""
        data = key.to_bytes(8, "little", signed=True)
        return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=self._key).digest(), "little") >> 11
