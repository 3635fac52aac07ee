"""A request as it arrives, its service class, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Limits and weight of one class. TTFT limit in seconds = `ttft_base_s` + `ttft_per_prompt_token_s` x prompt tokens."""

    name: str
    ttft_base_s: float
    ttft_per_prompt_token_s: float
    tpot_limit_s: float
    weight: float
    priority: int = 0

    def ttft_limit_s(self, prompt_tokens: float) -> float:
        return self.ttft_base_s + self.ttft_per_prompt_token_s * prompt_tokens


SERVICE_CLASSES: tuple[ServiceClass, ...] = (
    ServiceClass("chat", 1.0, 0.4e-3, 0.100, 1.0, 1),
    ServiceClass("code", 0.5, 0.4e-3, 0.080, 2.0, 2),
    ServiceClass("batch", 20.0, 1.0e-3, 0.300, 0.5, 0),
)
"""The frozen classes of DESIGN section 8; an index into this tuple is a `class_index`."""

CLASS_INDEX: dict[str, int] = {service.name: index for index, service in enumerate(SERVICE_CLASSES)}

LABEL_ALIASES: dict[str, str] = {"interactive": "chat", "conversation": "chat", "agent": "code", "summarization": "batch"}
"""Labels in use elsewhere, by the class that they mean here."""


def class_of_label(label: str) -> int | None:
    """Class index of a label or alias, case ignored; None for one that means nothing here."""
    name = label.strip().lower()
    return CLASS_INDEX.get(LABEL_ALIASES.get(name, name))


@dataclass(frozen=True, slots=True)
class Request:
    """What a scheduler may know when a request arrives. The true output length is not here, on purpose."""

    request_id: int
    arrival_s: float
    prompt_tokens: int
    class_index: int
    session: str | None = None
    prefix_blocks: tuple[int, ...] = ()
    prefix_block_tokens: int = 0
    attempts: int = 0

    @property
    def service(self) -> ServiceClass:
        return SERVICE_CLASSES[self.class_index]


class OutcomeKind(IntEnum):
    """How a request ended. Everything but COMPLETED counts as a failure at the worst value."""

    COMPLETED = 0
    REFUSED = 1  # the scheduler, a full queue or an open breaker said no
    UNSERVABLE = 2  # larger than the context or every KV pool
    FAILED = 3  # lost with its group, retries spent
    UNFINISHED = 4  # still in the system when the run ended


LATENCY_PARTS: tuple[str, ...] = (
    "queue_s",
    "prefill_compute_s",
    "decode_compute_s",
    "memory_stall_s",
    "communication_s",
    "host_s",
    "pause_s",
    "redone_s",
    "return_s",
)
"""Where a request's time went; the parts add up to `finish_s - arrival_s`."""


class Ended(NamedTuple):
    """The part of a `RequestOutcome` that says what the request was worth; made for every reward."""

    class_index: int
    kind: int
    arrival_s: float
    first_token_s: float
    finish_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What happened to one request; times are absolute seconds, NaN where the event never came."""

    request_id: int
    class_index: int
    kind: OutcomeKind
    reason: str
    group_index: int
    arrival_s: float
    admitted_s: float
    first_token_s: float
    finish_s: float
    prompt_tokens: int
    output_tokens: int
    preemptions: int = 0
    attempts: int = 1
    hit_tokens: int = 0
    parts: tuple[float, ...] = field(default=())

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first; 0 for a single token."""
        if self.output_tokens <= 1:
            return 0.0
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.finish_s - self.arrival_s
