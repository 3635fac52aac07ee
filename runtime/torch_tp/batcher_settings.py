"""Limits of one engine's batches, what they refuse at the door, and how busy the engine is."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.torch_tp.requests import GenerationRequest, Refused

PRIORITY_SLOT_FROM = 4
"""Slots from which one is kept for requests above normal priority."""


@dataclass(frozen=True, slots=True)
class BatcherSettings:
    """Limits of one engine. Sizes in tokens, times in seconds.

    kv_tokens_max: pool over all slots. slots_max: slots, running and retained. priority_slots, priority_kv_tokens: so much of both only
    requests above normal priority (> 0) may take, unless one runs alone; None: one slot from 4 slots on, and KV in the same proportion,
    so that such a request begins in the next step, however many of normal priority run.
    queue_limit: requests that may wait. chunk_tokens_*: prompt tokens per step. decode_steps_max: passes per message;
    burst_s: such a run should not take longer. growth_tokens: KV is reserved in such portions beyond what a request is expected to
    need. head_start_s: one level of priority is worth so long a wait. starve_after_s: a request that waited longer lets nobody pass
    and may displace later ones. preemptions_max: after so many a request is no more displaced. limit_headroom: share of the TPOT
    limit that a step may take; step_s_max: nor longer than that while only prompts are computed. retains_prefixes: keep the KV of
    finished requests while there is room.
    """

    context_tokens: int
    kv_tokens_max: int
    slots_max: int = 32
    vocabulary: int | None = None
    eos_ids: tuple[int, ...] = ()
    priority_slots: int | None = None
    priority_kv_tokens: int | None = None
    queue_limit: int = 256
    chunk_tokens_max: int = 512
    chunk_tokens_min: int = 16
    decode_steps_max: int = 8
    burst_s: float = 0.05
    growth_tokens: int = 64
    block_tokens: int = 16
    head_start_s: float = 2.0
    starve_after_s: float = 4.0
    preemptions_max: int = 4
    limit_headroom: float = 0.8
    step_s_max: float = 0.5
    retains_prefixes: bool = True

    def __post_init__(self) -> None:
        for name in ("context_tokens", "slots_max", "queue_limit", "chunk_tokens_min", "decode_steps_max", "growth_tokens", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"BatcherSettings: {name}={getattr(self, name)} must be at least 1")
        if self.chunk_tokens_max < self.chunk_tokens_min:
            raise ValueError(f"BatcherSettings: chunk_tokens_max={self.chunk_tokens_max} is below chunk_tokens_min={self.chunk_tokens_min}")
        for name, kept, most in (
            ("priority_slots", self.kept_slots, self.slots_max - 1),
            ("priority_kv_tokens", self.kept_kv_tokens, self.kv_tokens_max),
        ):
            if not 0 <= kept <= most:
                raise ValueError(f"BatcherSettings: {name}={kept} must be from 0 to {most}; the rest is for requests of normal priority")

    @property
    def kept_slots(self) -> int:
        """For requests above normal priority."""
        if self.priority_slots is None:
            return int(self.slots_max >= PRIORITY_SLOT_FROM)
        return self.priority_slots

    @property
    def kept_kv_tokens(self) -> int:
        """For requests above normal priority."""
        if self.priority_kv_tokens is None:
            return self.kv_tokens_max * self.kept_slots // self.slots_max
        return self.priority_kv_tokens

    @property
    def request_tokens_max(self) -> int:
        """Prompt plus answer of the largest request that can be served (K10)."""
        return min(self.context_tokens, self.kv_tokens_max)

    def check(self, request: GenerationRequest, *, has_text: bool) -> None:
        """Raises: Refused for a request that could never be served; has_text: whether there is a tokenizer."""
        if request.tokens_needed > self.request_tokens_max:
            raise Refused(
                "too_long",
                f"{len(request.prompt)} prompt tokens + max_tokens {request.max_tokens} = {request.tokens_needed} exceed "
                f"{self.request_tokens_max} (context {self.context_tokens}, KV pool {self.kv_tokens_max} tokens)",
            )
        largest = max(request.prompt + request.answer)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise Refused("invalid", f"token id {largest} in the prompt; the model has {self.vocabulary} ids from 0")
        if request.stop_strings and not has_text:
            raise Refused("invalid", "stop strings need a tokenizer, and the engine was started without one; use stop_ids")


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is; tokens count against kv_tokens_max. prefill_backlog_tokens: waiting and running."""

    waiting: int
    running: int
    decoding: int
    kv_tokens_running: int
    kv_tokens_retained: int
    prefill_backlog_tokens: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one request is: answer tokens made here, ids still to be computed before its next token, whether it holds a slot."""

    request_id: str
    generated: int
    prefill_left: int
    is_running: bool
