"""A smaller model behind another OpenAI-compatible server, the last step before a refusal under pressure: when that server may be asked,
and what it is sent. What it answers is `smaller_answer`'s business, who is told of it `forwarding`'s.

The server is one of many that may break: calls in flight are bounded, every wait has a deadline, and a breaker (the groups' own kind)
sees to it that a dead one costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from envs.decision.circuit_breaker import CircuitBreaker, ProbeLease, State
from envs.domain.requests import CLASS_INDEX, SERVICE_CLASSES
from envs.domain.suggestions import unknown_name
from runtime.backends.event_stream import message_of
from runtime.backends.http_client import HttpClient
from runtime.gateway.call_making import MEANT_HERE, Asked

CONNECT_S = 5.0
ANSWER_BYTES_MAX = 16 << 20
ERROR_BYTES_MAX = 2048
LEFT_OUT = MEANT_HERE | {"request_id"}
"""Fields of this service's own, which the OpenAI API does not have. vLLM's (top_k, min_tokens, …) are known to its kind and go along."""
OUTCOMES = ("answered", "cut", "abandoned", "unfit", "full", "breaker_open", "paused", "busy", "rejected", "failed")
"""What became of a call that was to go to the smaller model: answered there; broken off after its beginning; its caller left or its
deadline came; it cannot be said to another tokenizer; and then why the server was not asked, or did not answer."""

fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""A JSON object by its fields, each as it came."""


@dataclass(frozen=True, slots=True)
class SmallerModelSettings:
    """url: of the server, without /v1. model: its name there, and what callers are told. classes: that may be answered by it; the others
    are critical. max_in_flight: calls there at once. first_byte_s: until a stream's first event; gap_s: until each further one. answer_s:
    for an answer that is not streamed."""

    url: str
    model: str
    classes: tuple[str, ...] = ("chat", "batch")
    api_key: str = field(default="", repr=False)
    max_in_flight: int = 32
    first_byte_s: float = 10.0
    gap_s: float = 10.0
    answer_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in (("model", self.model), ("api_key", self.api_key)):  # both go into header lines
            if not (value.isascii() and value.isprintable()):
                raise ValueError(f"{name} must be printable ASCII")
        if not self.classes:
            raise ValueError("classes must name at least one service class")
        for name in self.classes:
            if name not in CLASS_INDEX:
                raise ValueError(f"classes: {unknown_name('service class', name, CLASS_INDEX)}")

    @property
    def server(self) -> tuple[str, str, str]:
        """What of it names the server; the rest are limits."""
        return self.url, self.model, self.api_key


class Unanswered(Exception):
    """Nothing came that a caller could be sent. outcome: one of OUTCOMES."""

    def __init__(self, outcome: str, detail: str = "") -> None:
        super().__init__(detail or outcome)
        self.outcome = outcome


def named_limit(asked: Asked) -> int | None:
    """Tokens that the caller allows an answer to have at most; None where that is left to us."""
    body = asked.calls[0].body
    limit: int | None = body.get("max_completion_tokens") or body.get("max_tokens")
    return limit


def body_for(asked: Asked, data: bytes, model: str) -> bytes | None:
    """The caller's own body, for `model` at another server, with the usual limit where it names none; None where it holds token ids,
    which mean something else to another tokenizer.

    data: the body as it came, which was understood already.
    """
    first = asked.calls[0]
    has_ids = asked.kind == "completion" and not all(isinstance(prompt.as_sent, str) for prompt in asked.prompts)
    if has_ids or first.stop_ids or first.body.get("logit_bias"):
        return None
    fields: dict[str, msgspec.Raw | str | int] = {name: value for name, value in fields_of(data).items() if name not in LEFT_OUT}
    fields["model"] = model
    if named_limit(asked) is None:
        fields["max_tokens"] = first.max_tokens
    return msgspec.json.encode(fields)


class SmallerModel:
    """The server, as the gateway knows it. Limits in `settings` may be replaced at any time. `in_flight` counts calls there."""

    def __init__(
        self, settings: SmallerModelSettings, now_s: Callable[[], float] = time.monotonic, rng: np.random.Generator | None = None
    ) -> None:
        self.settings, self.now_s = settings, now_s
        self.in_flight = 0
        self.breaker = CircuitBreaker(now_s=now_s, rng=rng or np.random.default_rng())
        key = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self.client = HttpClient(settings.url.rstrip("/").removesuffix("/v1"), key, CONNECT_S)
        self._is_retired = False

    def serves(self, class_index: int) -> bool:
        return SERVICE_CLASSES[class_index].name in self.settings.classes

    def enter(self) -> ProbeLease | None:
        """A place there, to be given back by `leave`; a lease where the call is a probe. Raises: Unanswered."""
        if self.in_flight >= self.settings.max_in_flight:
            raise Unanswered("full", f"{self.in_flight} calls are there already")
        lease = None
        if self.breaker.state is not State.CLOSED:
            lease = self.breaker.try_probe()
            if lease is None:
                raise Unanswered("breaker_open", self.breaker.reason)
        elif not self.breaker.allows():
            raise Unanswered("paused", "it asked to be left alone for a while")
        self.in_flight += 1
        return lease

    def leave(self) -> None:
        self.in_flight -= 1
        if self._is_retired and not self.in_flight:
            self.client.close()

    def retire(self) -> None:
        """Another one takes its place: answers under way come to their end."""
        self._is_retired = True
        if not self.in_flight:
            self.client.close()

    def close(self) -> None:
        self.client.close()


async def why_unreachable(settings: SmallerModelSettings) -> str:
    """What is wrong with the server as it can be seen now, "" for nothing; takes a few seconds at most."""
    smaller = SmallerModel(settings)
    try:
        async with asyncio.timeout(CONNECT_S):
            answer = await smaller.client.send("GET", "/v1/models")
            data = await answer.read(ANSWER_BYTES_MAX)
    except (OSError, TimeoutError) as error:
        return f"cannot be reached ({error or type(error).__name__})"
    finally:
        smaller.close()
    if answer.status != 200:
        return f"answers /v1/models with HTTP {answer.status}: {message_of(data[:ERROR_BYTES_MAX].decode('utf-8', 'replace'))}"
    return ""
