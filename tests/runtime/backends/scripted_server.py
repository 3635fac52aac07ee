"""A small OpenAI-compatible server that does what a script says: deterministic words, faults on demand, a metrics page."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

CONTEXT = 4096


class ScriptedServer:
    """Words are a function of prompt, seed and place, the same for each of n answers. `fault(path, index)` is asked before every word (-1:
    before the answer) and may name "die", "hang", "garble", "error_event", "no_finish", "no_marker", "another" (a choice that nobody asked
    for), "endless" (the word for ever; "endless_empty": events without one), or a status as "503" or "503+1" (with Retry-After: 1)."""

    def __init__(self, gap_s: float = 0.001, fault: Callable[[dict[str, Any], int], str | None] = lambda body, index: None) -> None:
        self.gap_s, self.fault = gap_s, fault
        self.in_flight = 0
        self.told_model: str | None = None  # None: as it was asked for
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.has_metrics = True
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_get("/v1/models", lambda request: web.json_response({"object": "list", "data": []}))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.has_metrics:
            raise web.HTTPNotFound
        lines = [f'vllm:num_requests_running{{model_name="m"}} {self.in_flight}', 'vllm:num_requests_waiting{model_name="m"} 0',
                 f'vllm:gpu_cache_usage_perc{{model_name="m"}} {self.in_flight / 10}']  # fmt: skip
        return web.Response(text="\n".join(lines))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        kind = self.fault(body, -1)
        if kind and kind[0].isdigit():
            status, _, after = kind.partition("+")
            headers = {"retry-after": after} if after else {}
            return _error(int(status), "scripted", headers)
        body.setdefault("max_tokens", 16)
        if body["max_tokens"] > CONTEXT:
            return _error(400, f"max_tokens={body['max_tokens']} exceeds {CONTEXT}", {})
        self.in_flight += 1
        try:
            return await self._stream(request, body, kind)
        finally:
            self.in_flight -= 1

    def words(self, body: dict[str, Any]) -> list[str]:
        key = f"{body.get('prompt') or body.get('messages')}|{body.get('seed')}".encode()
        return [" " + hashlib.blake2b(key + bytes([i % 256, i // 256]), digest_size=3).hexdigest() for i in range(body["max_tokens"])]

    async def _stream(self, request: web.Request, body: dict[str, Any], kind: str | None) -> web.StreamResponse:
        is_chat = "messages" in body
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        words, text = self.words(body), ""
        await self._strike(request, kind)
        answers, model = range(body.get("n") or 1), self.told_model or body.get("model")
        if not body.get("stream"):
            whole = {"message": {"role": "assistant", "content": "".join(words)}} if is_chat else {"text": "".join(words)}
            usage = {"prompt_tokens": 5, "completion_tokens": len(words) * len(answers)}
            choices = [{"index": place, "finish_reason": "length", **whole} for place in (*answers, *([7] if kind == "another" else []))]
            return web.json_response({"model": model, "choices": choices, "usage": usage})
        await response.prepare(request)
        stops = body.get("stop") or []
        for index, word in enumerate(words):
            kind = self.fault(body, index)
            if kind == "garble":
                await response.write(b"data: {not json\n\n")
            elif kind == "error_event":
                await response.write(b'data: {"error": {"message": "engine died"}}\n\ndata: [DONE]\n\n')
                return response
            while kind in ("endless", "endless_empty"):
                part = {"delta": {"content": word}} if is_chat else {"text": word}
                await response.write(_event({"model": model, "choices": [{"index": 0, **part}] if kind == "endless" else []}))
                await asyncio.sleep(self.gap_s)
            await self._strike(request, kind)
            await asyncio.sleep(self.gap_s)
            place = min((p for stop in stops if (p := (text + word).find(stop)) >= 0), default=-1)
            is_last = index + 1 == len(words) or place >= 0
            shown = (text + word)[len(text) : place] if place >= 0 else word
            text += word
            reason = ("stop" if place >= 0 else "length") if is_last and kind != "no_finish" else None
            part = {"delta": {"content": shown}} if is_chat else {"text": shown}
            choices = [{"index": answer, "finish_reason": reason, **part} for answer in (*answers, *([7] if kind == "another" else []))]
            await response.write(_event({"model": model, "choices": choices}))
            if is_last:
                break
        usage = {"prompt_tokens": 5, "completion_tokens": (index + 1) * len(answers)}
        await response.write(_event({"choices": [], "usage": usage}) + (b"" if kind == "no_marker" else b"data: [DONE]\n\n"))
        return response

    async def _strike(self, request: web.Request, kind: str | None) -> None:
        if kind == "die":
            request.transport.abort()
            raise ConnectionResetError
        if kind == "hang":
            await asyncio.sleep(3600)


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def _error(status: int, message: str, headers: dict[str, str]) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "code": status}}, status=status, headers=headers)
