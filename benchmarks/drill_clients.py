"""The callers of the drill: greedy requests over HTTP, streaming and not, each answer compared with the one that was given in calm."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.tp_drill import GAP_OF_A_TIE
from runtime.backends.http_client import HttpClient, HttpLost

PRIORITIES = (-10, 0, 10)
CLASSES = ("chat", "code", "batch")
CONTENT = ("whole", "tie")
PATIENCE_S = 120.0
HEADERS = "content-type: application/json\r\nx-request-id: {}\r\n"


@dataclass(frozen=True, slots=True)
class Reference:
    """What a prompt was answered in calm. ends: place in the text where each token ends; gaps: logprob of the likeliest token less that of
    the second, per token."""

    prompt: tuple[int, ...]
    tokens: int
    text: str
    ends: tuple[int, ...]
    gaps: tuple[float, ...]

    def is_tie(self, text: str) -> bool:
        """Whether an answer that differs does so first at a token that rounding decided."""
        same = next((place for place, (a, b) in enumerate(zip(text, self.text, strict=False)) if a != b), min(len(text), len(self.text)))
        token = next((index for index, end in enumerate(self.ends) if end > same), len(self.ends) - 1)
        return self.gaps[token] < GAP_OF_A_TIE


@dataclass(slots=True)
class Answer:
    """One request. Times on the monotonic clock. at_s: of each event with text. verdict: "whole", "tie", "changed", "tokens" or "lost"."""

    name: str
    tokens: int
    is_stream: bool
    began_s: float
    at_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    verdict: str = ""
    detail: str = ""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s

    def is_under_way(self, at_s: float) -> bool:
        return self.began_s <= at_s <= self.ended_s

    def standstill(self, struck_s: float, noticed_s: float) -> tuple[float, float] | None:
        """The longest gap between two events (begin, end) that was open between strike and notice; None where its tokens were over."""
        times = [self.began_s, *self.at_s]
        gaps = [(a, b) for a, b in itertools.pairwise(times) if b > struck_s and a <= noticed_s]
        return max(gaps, key=lambda gap: gap[1] - gap[0], default=None)


class Clients:
    """So many callers that ask again as soon as they have their answer, while `go` is set; `answers`: all so far, in order of their end."""

    def __init__(self, url: str, model: str, rng: random.Random) -> None:
        self._http, self._model, self._rng = HttpClient(url, {}, 5.0), model, rng
        self.answers: list[Answer] = []
        self._count = itertools.count(1)
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def refer(self, prompt: Sequence[int], tokens: int) -> Reference:
        """Raises: RuntimeError when not even the calm service answers in full."""
        body = {"prompt": list(prompt), "max_tokens": tokens, "logprobs": 2}
        status, data = await self._ask("reference", body, None)
        if status != 200:
            raise RuntimeError(f"no reference: HTTP {status}: {data[:300].decode(errors='replace')}")
        choice = msgspec.json.decode(data)["choices"][0]
        said = choice["logprobs"]
        ends = tuple(itertools.accumulate(len(text) for text in said["tokens"]))
        tops = [sorted(top.values(), reverse=True) for top in said["top_logprobs"]]
        gaps = tuple(top[0] - top[1] if len(top) > 1 else 0.0 for top in tops)
        if len(ends) != tokens:
            raise RuntimeError(f"no reference: {len(ends)} of {tokens} tokens")
        return Reference(tuple(prompt), tokens, choice["text"], ends, gaps)

    def start(self, references: Sequence[Reference], clients: int) -> None:
        self._tasks = [asyncio.create_task(self._ask_on(references)) for _ in range(clients)]

    async def stop(self) -> None:
        """Let every caller have its answer."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        self._http.close()

    async def _ask_on(self, references: Sequence[Reference]) -> None:
        while not self._is_over:
            await self._ask_once(self._rng.choice(references))

    async def _ask_once(self, reference: Reference) -> None:
        answer = Answer(f"drill-{next(self._count)}", reference.tokens, self._rng.random() < 0.5, time.monotonic())
        body: dict[str, Any] = {
            "prompt": list(reference.prompt), "max_tokens": reference.tokens, "priority": self._rng.choice(PRIORITIES),
            "service_class": self._rng.choice(CLASSES), "stream": answer.is_stream,
        }  # fmt: skip
        if answer.is_stream:
            body["stream_options"] = {"include_usage": True}
        try:
            async with asyncio.timeout(PATIENCE_S):
                status, data = await self._ask(answer.name, body, answer)
            answer.ended_s = time.monotonic()
            self._judge(answer, reference, status, data)
        except (HttpLost, TimeoutError) as error:
            answer.ended_s = time.monotonic()
            answer.verdict, answer.detail = "lost", f"{type(error).__name__}: {error}"
            await asyncio.sleep(0.1)
        self.answers.append(answer)
        if answer.verdict not in CONTENT:
            print(f"{answer.name} {answer.verdict}: {answer.detail}", flush=True)

    async def _ask(self, name: str, body: dict[str, Any], answer: Answer | None) -> tuple[int, bytes]:
        body = {"model": self._model, "temperature": 0, "ignore_eos": True, **body}
        response = await self._http.send("POST", "/v1/completions", HEADERS.format(name), msgspec.json.encode(body))
        data = bytearray()
        try:
            while part := await response.read_some():
                data += part
                if answer is not None and b'"text":"' in part:
                    answer.at_s.append(time.monotonic())
        finally:
            response.release()
        return response.status, bytes(data)

    def _judge(self, answer: Answer, reference: Reference, status: int, data: bytes) -> None:
        """One reason to be content, four not to be."""
        try:
            text, tokens, reason, error = (_of_stream if answer.is_stream else _of_body)(data)
        except (ValueError, KeyError, IndexError) as wrong:
            text, tokens, reason, error = "", -1, None, f"{type(wrong).__name__}: {wrong}"
        if status != 200 or error or reason != "length":
            answer.verdict, answer.detail = "lost", f"HTTP {status}, {reason}: {error or data[-300:].decode(errors='replace')}"
        elif tokens != reference.tokens:
            answer.verdict, answer.detail = "tokens", f"{tokens} tokens of {reference.tokens}"
        elif text == reference.text:
            answer.verdict = "whole"
        elif reference.is_tie(text):
            answer.verdict = "tie"
        else:
            answer.verdict, answer.detail = "changed", f"{text!r} for {reference.text!r}"


def _of_body(data: bytes) -> tuple[str, int, str | None, str]:
    """Text, tokens, finish reason, error."""
    body = msgspec.json.decode(data)
    if "error" in body:
        return "", -1, None, str(body["error"])
    choice = body["choices"][0]
    return choice["text"], body["usage"]["completion_tokens"], choice["finish_reason"], ""


def _of_stream(data: bytes) -> tuple[str, int, str | None, str]:
    """The same, of all events together."""
    if not data.startswith(b"data: "):
        return _of_body(data)
    events = [event[6:] for event in data.split(b"\n\n") if event.startswith(b"data: ")]
    if events[-1] != b"[DONE]":
        return "", -1, None, "the stream was cut"
    text, tokens, reason = [], -1, None
    for event in map(msgspec.json.decode, events[:-1]):
        if "error" in event:
            return "", -1, None, str(event["error"])
        for choice in event["choices"]:
            text.append(choice["text"])
            reason = choice["finish_reason"] or reason
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    return "".join(text), tokens, reason, ""
