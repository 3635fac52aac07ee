"""Answers in the API's words: chunks of a stream, or one JSON object. What is the same in every chunk is encoded once per answer."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.calls import Piece
from runtime.gateway.call_making import Asked
from runtime.gateway.errors import ApiError, sendable
from runtime.gateway.prompt_text import ModelText
from runtime.torch_tp.requests import TokenLogprobs

DONE = b"data: [DONE]\n\n"
EVENT_END = b"\n\n"
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
FINISH_REASONS = ("stop", "length", "content_filter", "tool_calls", "function_call")
"""The API's. Any other end of a piece is an error."""

encode = msgspec.json.encode


def text_json(text: str) -> bytes:
    try:
        return encode(text)
    except UnicodeEncodeError:
        return encode(sendable(text))


class Choice:
    """One answer as it grows."""

    __slots__ = ("chars", "finish_reason", "last_token_s", "logprobs", "output_tokens", "prompt_tokens", "texts", "tokens")

    def __init__(self, prompt_tokens: int, chars: int) -> None:
        """chars: of what stands before the answer's own text (an echoed prompt)."""
        self.prompt_tokens = prompt_tokens
        self.output_tokens: int | None = None
        self.tokens = 0
        self.texts: list[str] = []
        self.logprobs: list[tuple[int | None, str, TokenLogprobs]] = []
        self.chars = chars
        self.finish_reason: str | None = None
        self.last_token_s: float | None = None

    def take(self, piece: Piece, is_kept: bool) -> None:
        """is_kept: the text is needed again at the end (an answer that is not streamed). Raises: ApiError for an end that is a failure."""
        if piece.token is not None or (piece.text and piece.finish_reason is None):
            self.tokens += len(piece.parts) or 1
        if is_kept:
            if piece.text:
                self.texts.append(piece.text)
            if piece.logprobs is not None:
                self.logprobs.append((piece.token, piece.text, piece.logprobs))
        if piece.finish_reason is None:
            return
        if piece.finish_reason == "deadline":
            raise deadline_passed()
        if piece.finish_reason not in FINISH_REASONS:
            raise ApiError(500, f"The answer ended early ({piece.finish_reason}).", code="answer_cut", reason="answer_cut")
        self.finish_reason = piece.finish_reason
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        self.output_tokens = piece.output_tokens

    @property
    def tokens_made(self) -> int:
        return self.tokens if self.output_tokens is None else self.output_tokens


def deadline_passed() -> ApiError:
    return ApiError(504, "The request's deadline passed before the answer was complete.", code="deadline", reason="deadline")


class Answer:
    """The answer to one request: `choices` grow with `take`, and what to send is made of them."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.is_chat = asked.kind == "chat"
        prompts = [asked.prompt_of(place) for place in range(len(asked.calls))]
        self.choices = [Choice(prompt.tokens, len(prompt.echoed)) for prompt in prompts]
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        head = encode({"id": asked.answer_id, "object": kind, "created": asked.created_s, "model": asked.model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._opening = b',"delta":{"content":' if self.is_chat else b',"text":'
        self._closing = b"}" if self.is_chat else b""
        # with usage asked for, every other chunk says null
        self._tail = b'],"usage":null}' if asked.includes_usage else b"]}"
        self._begun: set[int] = set()
        # around the text of a plain token, which is nearly all of them
        self._plain = [self._head + b'{"index":%d' % place + self._opening for place in range(len(self.choices))]
        self._plain_end = self._closing + b',"logprobs":null,"finish_reason":null}' + self._tail + EVENT_END

    # --- streams --------------------------------------------------------------------------------------------------------------

    def events(self, place: int, piece: Piece) -> bytes:
        """The events of one piece (taken already): none for a token whose text is still held back."""
        is_plain = piece.finish_reason is None and piece.logprobs is None and not self.asked.has_running_usage
        if is_plain and place in self._begun:
            if piece.parts:
                return self._several(place, piece.parts)
            return self._plain[place] + text_json(piece.text) + self._plain_end if piece.text else b""
        data = b""
        if place not in self._begun:
            self._begun.add(place)
            data = self._beginning(place)
        if piece.parts:
            data += self._several(place, piece.parts)
        elif piece.text or piece.logprobs is not None:
            data += self._chunk(place, text_json(piece.text), self._logprobs_json(place, piece), b"null")
        if piece.finish_reason is not None:
            reason = encode(piece.finish_reason)
            if self.is_chat:
                data += self._head + b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (place, reason) + self._ending(place)
            else:
                data += self._chunk(place, b'""', b"null", reason)
        return data

    def _several(self, place: int, texts: tuple[str, ...]) -> bytes:
        """An event for each of several tokens that came together; usage so far, where it is asked for, is that after the last."""
        begin = self._plain[place]
        end = self._closing + b',"logprobs":null,"finish_reason":null}' + self._ending(place)
        return b"".join([part for text in texts for part in (begin, text_json(text), end)])

    def last_events(self) -> bytes:
        """After the last piece: usage where it was asked for, and the end marker."""
        if not self.asked.includes_usage:
            return DONE
        return self._head + b'],"usage":' + encode(self.usage()) + b"}" + EVENT_END + DONE

    def _beginning(self, place: int) -> bytes:
        """What comes before an answer's first token: the role, or the echoed prompt."""
        if self.is_chat:
            return (
                self._head
                + b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % place
                + self._ending(place)
            )
        echoed = self.asked.prompt_of(place).echoed
        return self._chunk(place, text_json(echoed), b"null", b"null") if echoed else b""

    def _chunk(self, place: int, text: bytes, logprobs: bytes, reason: bytes) -> bytes:
        return b"".join(
            (
                self._head, b'{"index":%d' % place, self._opening, text, self._closing, b',"logprobs":', logprobs, b',"finish_reason":',
                reason, b"}", self._ending(place),
            )
        )  # fmt: skip

    def _ending(self, place: int) -> bytes:
        if not self.asked.has_running_usage:
            return self._tail + EVENT_END
        choice = self.choices[place]
        return b'],"usage":' + encode(_usage(choice.prompt_tokens, choice.tokens_made)) + b"}" + EVENT_END

    def _logprobs_json(self, place: int, piece: Piece) -> bytes:
        if piece.logprobs is None:
            return b"null"
        choice = self.choices[place]
        said = self._logprobs([(piece.token, piece.text, piece.logprobs)], choice.chars)
        choice.chars += len(self._token_text(piece.token, piece.text))
        return encode(said)

    # --- one JSON object --------------------------------------------------------------------------------------------------------

    def json(self) -> bytes:
        """The whole answer."""
        choices: list[dict[str, Any]] = []
        for place, choice in enumerate(self.choices):
            text = sendable("".join(choice.texts))
            logprobs = None
            if self.asked.calls[place].logprobs is not None:
                logprobs = self._logprobs(choice.logprobs, choice.chars)
            said: dict[str, Any] = {"index": place}
            if self.is_chat:
                said["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                said["text"] = self.asked.prompt_of(place).echoed + text
            choices.append(said | {"logprobs": logprobs, "finish_reason": choice.finish_reason})
        return encode(
            {
                "id": self.asked.answer_id,
                "object": "chat.completion" if self.is_chat else "text_completion",
                "created": self.asked.created_s,
                "model": self.asked.model,
                "choices": choices,
                "usage": self.usage(),
            }
        )

    def usage(self) -> dict[str, int]:
        """Each prompt counts once, however many answers it got."""
        prompt = sum(choice.prompt_tokens for choice in self.choices[:: self.asked.answers_per_prompt])
        return _usage(prompt, sum(choice.tokens_made for choice in self.choices))

    # --- logprobs ---------------------------------------------------------------------------------------------------------------

    def _logprobs(self, tokens: list[tuple[int | None, str, TokenLogprobs]], offset: int) -> dict[str, Any]:
        if self.is_chat:
            return {"content": [self._chat_token(*token) for token in tokens], "refusal": None}
        said: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, text, logprobs in tokens:
            shown = self._token_text(token, text)
            top = {self._token_text(other, ""): finite(logprob) for other, logprob in logprobs.top}
            said["tokens"].append(shown)
            said["token_logprobs"].append(finite(logprobs.chosen))
            said["top_logprobs"].append(top | {shown: finite(logprobs.chosen)})  # the chosen one is always among them
            said["text_offset"].append(offset)
            offset += len(shown)
        return said

    def _chat_token(self, token: int | None, text: str, logprobs: TokenLogprobs) -> dict[str, Any]:
        return self._token_entry(token, text, logprobs.chosen) | {
            "top_logprobs": [self._token_entry(other, "", logprob) for other, logprob in logprobs.top]
        }

    def _token_entry(self, token: int | None, text: str, logprob: float) -> dict[str, Any]:
        model = self.asked.text
        shown, data = (
            model.token(token) if isinstance(model, ModelText) and token is not None else (sendable(text), sendable(text).encode())
        )
        return {"token": shown, "logprob": finite(logprob), "bytes": list(data)}

    def _token_text(self, token: int | None, text: str) -> str:
        model = self.asked.text
        return model.token(token)[0] if model is not None and token is not None else sendable(text)


def finite(logprob: float) -> float:
    """JSON has no infinity; the API says -9999 for what cannot be."""
    return logprob if logprob > -9999.0 else -9999.0


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens, "total_tokens": prompt_tokens + output_tokens}


def error_events(error: ApiError) -> bytes:
    """A stream that began ends with what went wrong, and its end marker."""
    return b"data: " + error.json() + EVENT_END + DONE
