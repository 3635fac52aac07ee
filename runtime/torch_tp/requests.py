"""What a caller asks of the engine and what comes back: requests, sampling settings, token events. No torch, no processes."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

from envs.domain.requests import LATENCY_PARTS, SERVICE_CLASSES

SEED_LIMIT = 2**63

FINISH_REASONS: tuple[str, ...] = ("stop", "length", "cancelled", "deadline", "error", "moved")
"""How an answer ends: a stop id or stop string, its token limit, its caller, its deadline, the engine (see the event's detail), or here
only, because it goes on in another engine."""

REFUSALS: tuple[str, ...] = ("too_long", "queue_full", "deadline_passed", "duplicate", "invalid", "closed")
"""Why a request is turned away at the door: `too_long`, `duplicate`, `invalid` by the caller's fault (400), else by load (429, 503)."""


class Refused(RuntimeError):
    """The request was not taken in; `reason` is one of REFUSALS, the message says what came and what would be accepted."""

    def __init__(self, reason: str, message: str) -> None:
        assert reason in REFUSALS, reason
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the next token is chosen from the logits. Applied in this order: penalties, temperature, top_k, top_p, min_p.

    temperature: 0 is greedy (ties to the lowest id). top_k: 0 is off. top_p: smallest set of tokens whose probabilities reach it.
    min_p: tokens less likely than this share of the likeliest are dropped. repetition_penalty: > 1 divides positive and multiplies
    negative logits of every token in prompt or answer; presence and frequency penalties are subtracted for tokens of the answer,
    once and per occurrence. seed: with the position it decides every draw, so that the same request continues alike after a
    preemption, a lost rank or under another split; None: derived from the request's id.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 1e-9, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 1e-3, 1e3),
            ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"SamplingSettings: {name}={value} must be within {low:g} to {high:g}")
        if self.top_k < 0:
            raise ValueError(f"SamplingSettings: top_k={self.top_k} must be >= 0 (0 = all tokens)")
        if self.seed is not None and not 0 <= self.seed < SEED_LIMIT:
            raise ValueError(f"SamplingSettings: seed={self.seed} must be within 0 to 2**63 - 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty needs to know which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to be generated.

    prompt: token ids, at least one. max_tokens: of the answer, at least 1. priority: higher first (a head start in the queue, not an
    absolute right; above 0 also a slot kept for it). class_index: into SERVICE_CLASSES, for its time limits. stop_ids: end the answer,
    as does the model's own end token unless ignore_eos. stop_strings: end it where its text contains one; never shown, not even in
    part. logprobs: None, or how many of the likeliest tokens to report beside the chosen one's (0 = the chosen one's alone).
    min_tokens: no stop id is chosen before so many. deadline_s: on the engine's monotonic clock; waiting or running, the request ends
    then. answer: tokens that another engine made already: this one goes on after them, with the same chance, and counts them as part of
    max_tokens. waited_s: how long it waited elsewhere: its place in the queue counts from then.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    priority: int = 0
    class_index: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logprobs: int | None = None
    deadline_s: float | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    answer: tuple[int, ...] = ()
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        who = f"GenerationRequest {self.request_id!r}"
        if not self.prompt:
            raise ValueError(f"{who}: the prompt has no tokens; give at least one")
        if min(self.prompt) < 0:
            raise ValueError(f"{who}: token id {min(self.prompt)} in the prompt is negative")
        if self.max_tokens < 1:
            raise ValueError(f"{who}: max_tokens={self.max_tokens} must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"{who}: min_tokens={self.min_tokens} must be within 0 to max_tokens={self.max_tokens}")
        if len(self.answer) >= self.max_tokens:
            raise ValueError(f"{who}: {len(self.answer)} answer tokens are there already and max_tokens={self.max_tokens}: nothing is left")
        if not 0 <= self.class_index < len(SERVICE_CLASSES):
            raise ValueError(f"{who}: class_index={self.class_index} unknown; there are {len(SERVICE_CLASSES)} service classes")
        if self.logprobs is not None and not 0 <= self.logprobs <= 64:
            raise ValueError(f"{who}: logprobs={self.logprobs} must be None or within 0 to 64")
        if "" in self.stop_strings:
            raise ValueError(f"{who}: an empty stop string would stop at once; leave it out")

    @property
    def tokens_needed(self) -> int:
        """Prompt plus allowed answer: what counts against every limit (K10)."""
        return len(self.prompt) + self.max_tokens

    @property
    def seed(self) -> int:
        """The seed in force, also where none was given."""
        if self.sampling.seed is not None:
            return self.sampling.seed
        return int.from_bytes(hashlib.blake2b(self.request_id.encode(), digest_size=8).digest(), "big") % SEED_LIMIT


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the model itself (before penalties, temperature and cuts).

    chosen: of the token taken. top: the likeliest (token id, logprob), best first, ties to the lowest id.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestReport:
    """What became of one request: stamps on the engine's monotonic clock (s), NaN where the event never came.

    parts: seconds by LATENCY_PARTS, each from its own stamps. hit_tokens: prompt tokens taken from the prefix cache.
    recomputed_tokens: tokens whose KV was lost (preempted, rank lost) and made again.
    """

    arrival_s: float
    admitted_s: float
    first_token_s: float
    finish_s: float
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    preemptions: int
    recoveries: int
    recomputed_tokens: int
    parts: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Arrival to first token: the queue is part of it (K11)."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first; 0 for a single token."""
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def unexplained_s(self) -> float:
        """End-to-end time that no stamp explains."""
        return self.e2e_s - sum(self.parts)

    def part(self, name: str) -> float:
        return self.parts[LATENCY_PARTS.index(name)]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of an answer, or its end, or both.

    index: place in the answer, from 0; of an end without a token, the number of tokens. token: None in an end without one.
    text: what may be shown now (text that could turn out to be part of a stop string, or half a character, comes later).
    finish_reason: one of FINISH_REASONS with the last event, else None. stop: the stop id or string that ended it.
    detail: for the reasons "error" and "deadline", what happened. report: with the last event.
    """

    request_id: str
    index: int
    token: int | None
    text: str = ""
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop: int | str | None = None
    detail: str = ""
    report: RequestReport | None = None
