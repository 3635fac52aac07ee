"""The gateway as a Starlette application: `make_app(dispatcher, settings)`. Loads no torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from runtime.gateway.admin import Admin, Administered
from runtime.gateway.admin_rollout import admin_rollout_routes
from runtime.gateway.api_keys import ApiKeys
from runtime.gateway.call_making import CallMaker, RequestIds
from runtime.gateway.errors import ApiError, internal_error
from runtime.gateway.generation import Generation, GenerationEndpoint
from runtime.gateway.interface import Dispatcher
from runtime.gateway.metrics import Metrics
from runtime.gateway.page import Page
from runtime.gateway.probes import Probes, error_response
from runtime.gateway.prompt_text import PromptTexts, TextCodec
from runtime.gateway.request_headers import RequestHeaders
from runtime.gateway.settings import GatewaySettings
from runtime.gateway.smaller_model import SmallerModelSettings
from runtime.tracing.tracer import Tracer


def load_tokenizer(path: str) -> TextCodec:
    """Raises: CheckpointError. Loaded where a model needs one: a gateway before foreign servers alone does without."""
    from runtime.torch_tp import tokenizer

    return tokenizer.load_tokenizer(path)


def version() -> str:
    try:
        return importlib.metadata.version("ballast")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class GatewayApp(Starlette):
    """Starlette, with a straight way to the endpoints that make text: they tell all their errors themselves, and what its layers add to
    every event of a stream would cost more than the event."""

    straight: Mapping[str, GenerationEndpoint] = MappingProxyType({})
    ids: RequestIds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        endpoint = self.straight.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is not None:
            await endpoint(scope, receive, send)
            return
        request_id = RequestHeaders.of(scope["headers"]).request_id or self.ids.next()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await super().__call__(scope, receive, send_with_id)


def make_app(
    dispatcher: Dispatcher,
    settings: GatewaySettings | None = None,
    *,
    load_text: Callable[[str], TextCodec] = load_tokenizer,
    tracer: Tracer | None = None,
    administered: Administered | None = None,
    smaller_model: SmallerModelSettings | None = None,
) -> GatewayApp:
    """The application over a dispatcher that runs already, or that its caller starts. `app.state`: `generation` (set `is_draining` to
    take nothing in any more), `metrics` (its `registry` takes further collectors); its caller may add `reloader` and
    `rollout`. tracer: closed by whoever made it.

    administered: what stands behind /admin; without it there is none. smaller_model: where calls go that would be refused under pressure;
    `app.state.generation.smaller` takes another one at any time. The tokenizers of all models are loaded before the first request
    is taken.
    """
    chosen = settings or GatewaySettings()
    metrics = Metrics(version(), dispatcher.models, dispatcher.status, has_old_names=chosen.has_old_metric_names)
    if tracer is not None:
        metrics.registry.register(tracer)
    texts = PromptTexts(load_text, chosen.tokeniser_threads)
    maker = CallMaker(chosen, dispatcher.models, texts)
    shared = Generation(dispatcher, chosen, ApiKeys(chosen.api_keys), maker, RequestIds(), metrics, tracer)
    shared.smaller.use(smaller_model)
    metrics.registry.register(shared.smaller)
    probes = Probes(shared, version())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        for model in dispatcher.models().values():
            if not model.is_foreign:
                await texts.of(model)
        try:
            yield
        finally:
            texts.close()
            shared.smaller.close()

    async def told(request: Request, error: Exception) -> Response:
        """Errors of all but the two endpoints that make text, which tell their own."""
        if isinstance(error, HTTPException):
            error = _of_http(request, error)
        assert isinstance(error, ApiError)
        metrics.count_refusal(error.reason)
        metrics.count_request("other", error.status)
        return error_response(error, shared.settings.retry_after_s)

    async def failed(request: Request, error: Exception) -> Response:
        return await told(request, internal_error())

    straight = {
        "/v1/chat/completions": GenerationEndpoint("chat", shared),
        "/v1/completions": GenerationEndpoint("completion", shared),
    }
    app = GatewayApp(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in straight.items()),
            Route("/v1/models", probes.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", probes.model, methods=["GET"]),  # ids have slashes
            Route("/livez", probes.livez, methods=["GET"]),
            Route("/ready", probes.ready, methods=["GET"]),
            Route("/readyz", probes.ready, methods=["GET"]),
            Route("/health", probes.ready, methods=["GET"]),
            Route("/metrics", probes.metrics, methods=["GET"]),
            Route("/version", probes.version, methods=["GET"]),
            Route("/openapi.json", probes.openapi, methods=["GET"]),
            *(Admin(administered, shared).routes if administered is not None else []),
            *Page().routes,
            *admin_rollout_routes(shared),
        ],
        exception_handlers={ApiError: told, HTTPException: told, Exception: failed},
        lifespan=lifespan,
    )
    app.straight, app.ids = straight, shared.ids
    app.router.redirect_slashes = False
    app.state.generation, app.state.metrics = shared, metrics
    app.state.reloader = app.state.rollout = None
    return app


def _of_http(request: Request, error: HTTPException) -> ApiError:
    """Starlette's own errors in the API's shape: unknown paths and methods."""
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in (error.headers or {}).items()]
    if error.status_code == 404:
        message = f"Invalid URL ({request.method} {request.url.path[:200]})"
        return ApiError(404, message, code="unknown_url", reason="not_found", headers=headers)
    if error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path[:200]}"
        return ApiError(405, message, code="method_not_supported", reason="not_found", headers=headers)
    return ApiError(error.status_code, error.detail, headers=headers)
