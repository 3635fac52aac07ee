"""One answer of the smaller model's server, as it comes: whether it is one at all, whether it is whole, and what it says of itself. Its
waits have deadlines, and the server's breaker is told how it went."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from envs.decision.circuit_breaker import Outcome, classify, is_backpressure
from runtime.backends.event_stream import (
    OF_THE_OPERATOR,
    TOKEN_CHARS_MAX,
    BadEvent,
    Event,
    EventReader,
    Usage,
    event_of,
    message_of,
    seconds_of,
)
from runtime.backends.http_client import HttpConnection, HttpLost
from runtime.gateway.call_making import Asked
from runtime.gateway.smaller_model import ANSWER_BYTES_MAX, ERROR_BYTES_MAX, SmallerModel, Unanswered, fields_of, named_limit

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
DEGRADED_CHARS_MAX = 256
DONE = b"data: [DONE]\n\n"
EVENTS_PER_TOKEN_MAX = 2
EVENTS_MORE = 64  # a role, usage, signs of life


def _most(asked: Asked) -> tuple[int, int]:
    """Events and characters of all that was asked for."""
    tokens = named_limit(asked) or asked.calls[0].max_tokens
    echoed = sum(len(prompt.as_sent) for prompt in asked.prompts if isinstance(prompt.as_sent, str)) * asked.answers_per_prompt
    count = len(asked.calls)
    return count * (tokens * EVENTS_PER_TOKEN_MAX + EVENTS_MORE), count * (tokens + 1) * TOKEN_CHARS_MAX + echoed


class CutShort(Exception):
    """An answer that began broke off; the message says how."""


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
        self._reader = EventReader()
        self._outcome, self._reason, self._is_busy = Outcome.NEUTRAL, "", False
        self._events_left, self._chars_left = _most(asked)
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
        if self._connection is not None:
            self._connection.release()
        self._smaller.breaker.record(self._outcome, began_s=self._began_s, lease=self._lease, reason=self._reason)
        self._smaller.leave()

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
        outcome = classify(None if status < 400 or status in OF_THE_OPERATOR else status)
        self._outcome = outcome
        return Unanswered("failed" if outcome is Outcome.FAULT else "rejected", self._reason)

    async def _whole(self, connection: HttpConnection) -> bytes:
        """Raises: HttpLost, CutShort for what is no answer."""
        data = await connection.read(ANSWER_BYTES_MAX + 1)
        if len(data) > ANSWER_BYTES_MAX:
            raise CutShort(f"an answer of over {ANSWER_BYTES_MAX} bytes")
        try:
            event = event_of(data)
        except BadEvent as error:
            raise CutShort(str(error)) from error
        self._note(event)
        self._finished()
        return self._named(data, event)

    async def _next_events(self, connection: HttpConnection) -> bytes:
        """Whatever has come of the stream, in whole events. Raises: HttpLost, CutShort for a broken stream."""
        while chunk := await connection.read_some():
            try:
                if data := b"".join([self._relayed(found) for found in self._reader.take(chunk)]):
                    return data
            except BadEvent as error:
                raise CutShort(str(error)) from error
        return self._ended()  # some servers end without a word

    def _ended(self) -> bytes:
        """The end, as the caller gets it. Raises: CutShort where it came too early."""
        try:
            self._reader.end()
        except BadEvent as error:
            raise CutShort(str(error)) from error
        self._finished()
        return DONE

    def _relayed(self, found: tuple[bytes, Event] | None) -> bytes:
        """An event as the caller gets it."""
        if found is None:
            self._finished()
            return DONE
        data, event = found
        self._note(event)
        return b"data: " + self._named(data, event) + b"\n\n"

    def _note(self, event: Event) -> None:
        """Raises: CutShort for what is no answer to what was asked."""
        self.usage = event.usage or self.usage
        self._events_left -= 1
        for choice in event.choices or ():
            index = 0 if choice.index is None else choice.index
            if index not in range(len(self._asked.calls)):
                raise CutShort(f"an answer that nobody asked for ({str(index)[:32]})")
            text = choice.said()
            self.tokens += bool(text)
            self._chars_left -= len(text)
            if choice.finish_reason:
                self.finish_reasons[int(index)] = str(choice.finish_reason)[:64]
        if self._events_left < 0 or self._chars_left < 0:
            raise CutShort("longer than max_tokens can be")

    def _named(self, data: bytes, event: Event) -> bytes:
        """With the model's name as callers are told it, where the server calls it otherwise."""
        name = self._settings.model
        if event.model == name:
            return data
        try:
            fields: dict[str, msgspec.Raw | str] = {**fields_of(data)}
        except (ValueError, RecursionError) as error:
            raise CutShort(f"not what the API says ({str(error)[:200]})") from error
        fields["model"] = name
        return msgspec.json.encode(fields)
