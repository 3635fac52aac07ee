"""Callers of the router drills: requests and streams over kept connections, each answer judged by its tokens."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from runtime.backends.http_client import HttpClient, HttpLost

HEADER = "content-type: application/json\r\n"
TOKEN = re.compile(rb'"content":" t(\d+)"')


@dataclass(slots=True)
class Outcome:
    """One answer. status 0: no answer. is_whole: every token once and in order, and a proper end. gaps_s: between arrivals."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    is_whole: bool = False
    error: str = ""
    took_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


class Callers:
    """Asks one router."""

    def __init__(self, url: str, tokens: int = 20) -> None:
        self._client, self._tokens = HttpClient(url, {}, 60.0), tokens  # a full machine takes its time

    def close(self) -> None:
        self._client.close()

    def _body(self, is_stream: bool) -> bytes:
        message = {"role": "user", "content": "benchmark prompt " * 16}
        return msgspec.json.encode(
            {"model": "mock", "messages": [message], "max_tokens": self._tokens, "temperature": 0, "stream": is_stream}
        )

    async def ask(self, is_stream: bool = False, leave_after_s: float | None = None) -> Outcome:
        """One request, to its end, or left after so long."""
        outcome, began_s = Outcome(), time.monotonic()
        try:
            async with asyncio.timeout(leave_after_s):
                answer = await self._client.send("POST", "/v1/chat/completions", HEADER, self._body(is_stream))
                try:
                    outcome.status = answer.status
                    data = bytearray()
                    last_s = time.monotonic()
                    while part := await answer.read_some():
                        now_s = time.monotonic()
                        outcome.gaps_s.append(now_s - last_s)
                        data += part
                        last_s = now_s
                finally:
                    answer.release()
            self._judge(outcome, bytes(data), is_stream)
        except (HttpLost, TimeoutError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.took_s = time.monotonic() - began_s
        return outcome

    def _judge(self, outcome: Outcome, data: bytes, is_stream: bool) -> None:
        wanted = list(range(self._tokens))
        if is_stream:
            outcome.tokens = [int(number) for number in TOKEN.findall(data)]
            outcome.is_whole = outcome.tokens == wanted and data.endswith(b"data: [DONE]\n\n") and b'"error"' not in data
        else:
            outcome.tokens = [int(number) for number in re.findall(rb" t(\d+)", data)]
            outcome.is_whole = outcome.status == 200 and outcome.tokens == wanted
        if not outcome.is_whole:
            outcome.error = f"HTTP {outcome.status}: {data[-200:].decode(errors='replace')}"

    async def many(self, count: int, at_once: int, is_stream: bool = False) -> list[Outcome]:
        """So many requests by `at_once` callers that ask again when they have their answer."""
        left, outcomes = [count], list[Outcome]()

        async def caller() -> None:
            while left[0] > 0:
                left[0] -= 1
                outcomes.append(await self.ask(is_stream))

        await asyncio.gather(*(caller() for _ in range(at_once)))
        return outcomes

    async def at_rate(self, rate_per_s: float, during_s: float) -> list[asyncio.Task[Outcome]]:
        """Requests begun so often, whatever becomes of those before."""
        tasks = []
        for _ in range(int(rate_per_s * during_s)):
            tasks.append(asyncio.create_task(self.ask()))
            await asyncio.sleep(1.0 / rate_per_s)
        return tasks


def failed(outcomes: Sequence[Outcome]) -> int:
    return sum(not outcome.is_whole for outcome in outcomes)
