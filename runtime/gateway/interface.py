"""What the gateway needs of whoever serves calls: the Protocol `Dispatcher`, and what it says about models and groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.calls import Call, Piece


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by the name that callers use.

    tokens_max: most tokens of prompt and answer together that any group can hold, the smallest of all limits (K10); None where nobody says.
    model_path: where its tokenizer lies (a directory, a `.gguf` file, a known name); None for a foreign server's model, whose text that
    server makes: prompts are then passed on as they came. created_s: Unix time.
    """

    model_id: str
    tokens_max: int | None = None
    model_path: str | None = None
    created_s: int = 0
    owned_by: str = "ballast"

    @property
    def is_foreign(self) -> bool:
        return self.model_path is None


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """One group now. is_serving: it would be given a call. state: serving, draining, ejected, dead, starting, …; detail: why, in words.

    kv_used_fraction: None where nobody says. The last three are counts since the group's start, None where it does not count them.
    """

    name: str
    model_id: str
    is_serving: bool
    state: str = "serving"
    detail: str = ""
    running: int = 0
    waiting: int = 0
    kv_used_fraction: float | None = None
    preemptions: int | None = None
    prefix_query_tokens: int | None = None
    prefix_hit_tokens: int | None = None


class Dispatcher(Protocol):
    """Takes calls to groups. `models` and `status` are asked often and answer from memory."""

    def run(self, call: Call) -> AsyncIterator[Piece]:
        """The answer's pieces, in order, the last one with a finish_reason. Raises: Refusal, at once or between two pieces.

        Closing the iterator, or cancelling the task that waits for its next piece, ends the work at once.
        """
        ...

    def models(self) -> Mapping[str, ServedModel]: ...

    async def is_ready(self) -> bool:
        """Whether a token can really be made now: from a recent one, or by a probe (K22)."""
        ...

    def status(self) -> Sequence[GroupStatus]: ...
