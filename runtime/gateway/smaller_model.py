"""A smaller model behind another OpenAI-compatible server, the last step before a refusal under pressure: when that server may be asked,
what it is sent, and whether what comes back is an answer. Who is told of it is `forwarding`'s business.

The server is one of many that may break: calls in flight are bounded, every wait has a deadline, and a breaker (the groups' own kind)
sees to it that a dead one costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from envs.decision.circuit_breaker import CircuitBreaker, Outcome, ProbeLease, State, classify, is_backpressure
from envs.domain.requests import CLASS_INDEX, SERVICE_CLASSES
from envs.domain.suggestions import unknown_name
from runtime.backends.event_stream import DONE, Event, EventLines, Usage, decode_event, message_of, seconds_of
from runtime.backends.http_client import HttpClient, HttpConnection, HttpLost
from runtime.gateway.call_making import MEANT_HERE, Asked

CONNECT_S = 5.0
ANSWER_BYTES_MAX = 16 << 20
ERROR_BYTES_MAX = 2048
DEGRADED_CHARS_MAX = 256
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
LEFT_OUT = MEANT_HERE | {"request_id"}
"""Fields of this service's own, which the OpenAI API does not have. vLLM's (top_k, min_tokens, …) are known to its kind and go along."""
OPERATORS_MISTAKES = (401, 403, 404)
"""A wrong key or model name is in the service file, not in the caller's request: faults of the server as it is configured."""
OUTCOMES = ("answered", "cut", "abandoned", "unfit", "full", "breaker_open", "paused", "busy", "rejected", "failed")
"""What became of a call that was to go to the smaller model: answered there; broken off after its beginning; its caller left or its
deadline came; it cannot be said to another tokenizer; and then why the server was not asked, or did not answer."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.encode


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


class CutShort(Exception):
    """An answer that began broke off; the message says how."""


def body_for(asked: Asked, data: bytes, model: str) -> bytes | None:
    """The caller's own body, for `model` at another server; None where it holds token ids, which mean something else to another tokenizer.

    data: the body as it came, which was understood already.
    """
    first = asked.calls[0]
    has_ids = asked.kind == "completion" and not all(isinstance(prompt.as_sent, str) for prompt in asked.prompts)
    if has_ids or first.stop_ids or first.body.get("logit_bias"):
        return None
    fields: dict[str, msgspec.Raw | str] = {name: value for name, value in _fields.decode(data).items() if name not in LEFT_OUT}
    fields["model"] = model
    return _encode(fields)


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


class SmallerAnswer:
    """One call at the server: `begin`, then `more` until `is_whole`, and `close` whatever happened. Tells the breaker how it went.

    finish_reasons: by choice. tokens: pieces of text so far. usage: as the server tells it, None until it does.
    """

    def __init__(self, smaller: SmallerModel, asked: Asked, deadline_s: float) -> None:
        """deadline_s: the caller's, on the monotonic clock. Raises: Unanswered when the server may not be asked now."""
        self._lease = smaller.enter()
        self._smaller, self._settings, self._asked, self._deadline_s = smaller, smaller.settings, asked, deadline_s
        self._began_s = smaller.now_s()
        self._connection: HttpConnection | None = None
        self._lines = EventLines()
        self._outcome, self._reason, self._is_busy = Outcome.NEUTRAL, "", False
        self.is_whole = False
        self.finish_reasons: dict[int, str] = {}
        self.tokens = 0
        self.usage: Usage | None = None

    async def begin(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The whole answer, or what a stream begins with. Raises: Unanswered."""
        is_stream = self._asked.is_stream
        limit_s = self._settings.first_byte_s if is_stream else self._settings.answer_s
        left_s = self._deadline_s - self._began_s
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        try:
            async with asyncio.timeout(min(limit_s, left_s)):
                self._connection = await self._smaller.client.send("POST", PATHS[self._asked.kind], lines, body)
                if self._connection.status != 200:
                    raise await self._refusal(self._connection)
                data = await (self._next_events(self._connection) if is_stream else self._whole(self._connection))
        except TimeoutError:
            if left_s <= limit_s:
                raise Unanswered("abandoned", "its deadline came first") from None
            self._fault(f"nothing within {limit_s:g} s")
        except (HttpLost, CutShort) as error:
            self._fault(str(error))
        else:
            return data
        raise Unanswered("failed", self._reason)

    async def more(self) -> bytes:
        """The next events of a stream. Raises: CutShort."""
        assert self._connection is not None
        try:
            async with asyncio.timeout(self._settings.gap_s):
                return await self._next_events(self._connection)
        except TimeoutError:
            self._fault(f"silent for {self._settings.gap_s:g} s")
        except (HttpLost, CutShort) as error:
            self._fault(str(error))
        raise CutShort(self._reason)

    def close(self) -> None:
        """The place is given back; work that goes on there ends with its connection."""
        self._smaller.leave()
        if self._connection is not None:
            self._connection.release()
        self._smaller.breaker.record(self._outcome, began_s=self._began_s, lease=self._lease, reason=self._reason)

    @property
    def degraded_there(self) -> str:
        """What that server, a Ballast itself, took from the answer."""
        told = self._connection.headers.get("x-ballast-degraded", "") if self._connection is not None else ""
        return told if told.isascii() and told.isprintable() and len(told) <= DEGRADED_CHARS_MAX else ""

    @property
    def outcome(self) -> str:
        """In the words of notes of attempts."""
        return "busy" if self._is_busy else self._outcome.name.lower()

    @property
    def reason(self) -> str:
        return self._reason

    # --------------------------------------------------------------------------------------------------------------------------

    def _fault(self, reason: str) -> None:
        self._outcome, self._reason = Outcome.FAULT, reason

    def _finished(self) -> None:
        """Raises: CutShort unless every answer that was asked for has its end."""
        wanted = len(self._asked.calls)
        if len(self.finish_reasons) < wanted:
            raise CutShort(f"{len(self.finish_reasons)} of {wanted} answers have an end")
        self.is_whole, self._outcome = True, Outcome.OK

    async def _refusal(self, connection: HttpConnection) -> Unanswered:
        """What a status other than 200 means, and for whom."""
        status, after = connection.status, connection.headers.get("retry-after")
        text = (await connection.read(ERROR_BYTES_MAX)).decode("utf-8", "replace")
        self._reason = f"HTTP {status}: {message_of(text)}"
        if is_backpressure(status, after is not None):
            self._smaller.breaker.record_backpressure(seconds_of(after), self._lease)
            self._lease, self._is_busy = None, True
            return Unanswered("busy", self._reason)
        # redirects are not followed, so that anything else is no answer either
        outcome = classify(None if status < 400 or status in OPERATORS_MISTAKES else status)
        self._outcome = outcome
        return Unanswered("failed" if outcome is Outcome.FAULT else "rejected", self._reason)

    async def _whole(self, connection: HttpConnection) -> bytes:
        """Raises: HttpLost, CutShort for what is no answer."""
        data = await connection.read(ANSWER_BYTES_MAX + 1)
        if len(data) > ANSWER_BYTES_MAX:
            raise CutShort(f"an answer of over {ANSWER_BYTES_MAX} bytes")
        event = self._event(data)
        self._finished()
        return self._named(data, event)

    async def _next_events(self, connection: HttpConnection) -> bytes:
        """Whatever has come of the stream, in whole events. Raises: HttpLost, CutShort for a broken stream."""
        while chunk := await connection.read_some():
            try:
                found = self._lines.feed(chunk)
            except ValueError as error:
                raise CutShort(str(error)) from error
            if data := b"".join([self._relayed(event) for event in found if not self.is_whole]):
                return data
        raise CutShort("the stream ended without its end marker")

    def _relayed(self, data: bytes) -> bytes:
        """An event as the caller gets it."""
        if data == DONE:
            self._finished()
            return b"data: [DONE]\n\n"
        return b"data: " + self._named(data, self._event(data)) + b"\n\n"

    def _event(self, data: bytes) -> Event:
        """Raises: CutShort for what the API does not know, and for an error."""
        try:
            event = decode_event(data)
        except (ValueError, RecursionError) as error:
            raise CutShort(f"not what the API says ({str(error)[:200]})") from error
        if event.error is not None:
            raise CutShort(f"error: {str(event.error)[:200]}")
        self.usage = event.usage or self.usage
        for choice in event.choices or ():
            self.tokens += bool(choice.shown)
            if choice.finish_reason is not None and isinstance(choice.index, int) and 0 <= choice.index < len(self._asked.calls):
                self.finish_reasons[choice.index] = str(choice.finish_reason)[:64]
        return event

    def _named(self, data: bytes, event: Event) -> bytes:
        """With the model's name as callers are told it, where the server calls it otherwise."""
        name = self._settings.model
        if event.model == name:
            return data
        try:
            fields: dict[str, msgspec.Raw | str] = {**_fields.decode(data)}
        except (ValueError, RecursionError) as error:
            raise CutShort(f"not what the API says ({str(error)[:200]})") from error
        fields["model"] = name
        return _encode(fields)


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
