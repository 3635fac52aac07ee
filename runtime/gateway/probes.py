"""The GET endpoints: models, liveness, readiness, metrics, version, the API's description."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from runtime.gateway.errors import ApiError, model_not_found
from runtime.gateway.generation import Generation
from runtime.gateway.interface import ServedModel
from runtime.gateway.openapi import description
from runtime.gateway.request_headers import RequestHeaders

logger = logging.getLogger(__name__)


class Probes:
    """Answers about the service rather than of a model."""

    def __init__(self, shared: Generation, version: str) -> None:
        self._shared = shared
        self._version = version

    async def models(self, request: Request) -> Response:
        self._check(request)
        models = self._shared.dispatcher.models()
        return _json({"object": "list", "data": [_model(model) for model in models.values()]})

    async def model(self, request: Request) -> Response:
        self._check(request)
        name = request.path_params["model_id"]
        model = self._shared.dispatcher.models().get(name)
        if model is None:
            raise model_not_found(name[:256])
        return _json(_model(model))

    async def livez(self, request: Request) -> Response:
        """The process answers; nothing else is meant."""
        return _json({"alive": True})

    async def ready(self, request: Request) -> Response:
        """Whether a token can really be made, asked of the dispatcher: one that does not answer in time is not ready (K22)."""
        can_serve, reason = False, "draining"
        if not self._shared.is_draining:
            can_serve, reason = await self._asked_dispatcher()
        status = 200 if can_serve else 503
        groups = [{name: value for name, value in asdict(group).items() if value is not None} for group in self._groups()]
        body: dict[str, Any] = {"ready": can_serve, "groups": groups}
        headers = {}
        if not can_serve:
            body["reason"] = reason
            headers["retry-after"] = "1"
        return _json(body, status, headers)

    async def metrics(self, request: Request) -> Response:
        if self._shared.settings.metrics_needs_key:
            self._check(request)
        return Response(self._shared.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def version(self, request: Request) -> Response:
        return _json({"version": self._version})

    async def openapi(self, request: Request) -> Response:
        return _json(description(self._version, list(self._shared.dispatcher.models())))

    def _check(self, request: Request) -> None:
        self._shared.keys.check(RequestHeaders.of(request.scope["headers"]).authorization)

    async def _asked_dispatcher(self) -> tuple[bool, str]:
        try:
            async with asyncio.timeout(self._shared.settings.ready_wait_s):
                return bool(await self._shared.dispatcher.is_ready()), "no group can make a token"
        except TimeoutError:
            return False, f"the dispatcher did not answer within {self._shared.settings.ready_wait_s:g} s"
        except Exception:
            logger.exception("readiness could not be asked")
            return False, "the dispatcher failed"

    def _groups(self) -> list[Any]:
        try:
            return list(self._shared.dispatcher.status())
        except Exception:
            logger.exception("status could not be asked")
            return []


def _model(model: ServedModel) -> dict[str, Any]:
    said: dict[str, Any] = {"id": model.model_id, "object": "model", "created": model.created_s, "owned_by": model.owned_by}
    if model.tokens_max is not None:
        said["max_model_len"] = model.tokens_max
    return said


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, dict(headers or {}), media_type="application/json")


def error_response(error: ApiError, retry_after_s: float) -> Response:
    headers = {name.decode(): value.decode("latin-1") for name, value in error.headers(retry_after_s)}
    return Response(error.json(), error.status, headers)
