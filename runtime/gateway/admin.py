"""The admin endpoints: the service's inside, and an operator's orders (docs/admin_state.md).

Behind the API keys; without keys they answer to loopback alone. An order needs a JSON content type, which no page of another site can send
through a browser unasked.
"""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Any, Literal, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.gateway.admin_access import check_access
from runtime.gateway.errors import ApiError, invalid
from runtime.gateway.generation import Generation, shutting_down
from runtime.gateway.recent_requests import requests_told

BODY_BYTES_MAX = 64 << 10
ORDER_WAIT_S = 60.0
BODY_WAIT_S = 10.0
STATUS_OF = {"unknown_group": 404, "conflict": 409, "not_possible": 422, "invalid": 400}


class OrderRefused(Exception):
    """An order that is not carried out; reason: a key of STATUS_OF."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Administered(Protocol):
    """What can be administered. All raise OrderRefused where it cannot be done."""

    def admin_state(self) -> dict[str, Any]: ...

    async def drain_group(self, name: str) -> dict[str, Any]: ...

    async def undrain_group(self, name: str) -> dict[str, Any]: ...

    async def resplit_group(self, name: str, corner: str | None, shares: list[float] | None) -> dict[str, Any]: ...

    async def join_group(self, name: str, target: str) -> dict[str, Any]: ...


Share = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class ResplitBody(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one of the two."""

    corner: Literal["even", "compute", "bandwidth", "memory", "planner"] | None = None
    shares: Annotated[list[Share], msgspec.Meta(min_length=1, max_length=1024)] | None = None


class JoinBody(msgspec.Struct, forbid_unknown_fields=True):
    target: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class EmptyBody(msgspec.Struct, forbid_unknown_fields=True):
    pass


_resplit_body, _join_body, _empty_body = (msgspec.json.Decoder(kind) for kind in (ResplitBody, JoinBody, EmptyBody))


class Admin:
    """`routes` for an application that turns ApiError into an answer."""

    def __init__(self, administered: Administered, shared: Generation) -> None:
        self._administered, self._shared = administered, shared
        self._under_way: set[asyncio.Task[Any]] = set()

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/admin/state", self.state, methods=["GET"]),
            Route("/admin/requests", self.requests, methods=["GET"]),
            Route("/admin/groups/{name:path}/drain", self.drain, methods=["POST"]),
            Route("/admin/groups/{name:path}/undrain", self.undrain, methods=["POST"]),
            Route("/admin/groups/{name:path}/resplit", self.resplit, methods=["POST"]),
            Route("/admin/groups/{name:path}/join", self.join, methods=["POST"]),
        ]

    def check(self, request: Request) -> None:
        """Raises: ApiError unless this caller may see the inside and give orders."""
        check_access(request, self._shared)

    async def state(self, request: Request) -> Response:
        self.check(request)
        smaller = self._shared.smaller.told()
        return _json(self._administered.admin_state() | ({"smaller_model": smaller} if smaller is not None else {}))

    async def requests(self, request: Request) -> Response:
        self.check(request)
        return _json(requests_told(self._shared.recent))

    async def drain(self, request: Request) -> Response:
        await self._order(request, _empty_body)
        return await self._answered(self._administered.drain_group(request.path_params["name"]))

    async def undrain(self, request: Request) -> Response:
        await self._order(request, _empty_body)
        return await self._answered(self._administered.undrain_group(request.path_params["name"]))

    async def resplit(self, request: Request) -> Response:
        body: ResplitBody = await self._order(request, _resplit_body)
        if (body.corner is None) == (body.shares is None):
            raise invalid('Give either "corner" or "shares".')
        if body.shares is not None and not (math.isfinite(sum(body.shares)) and sum(body.shares) > 0.0):
            raise invalid('"shares" must be numbers >= 0, one of them above 0.', param="shares")
        return await self._answered(self._administered.resplit_group(request.path_params["name"], body.corner, body.shares))

    async def join(self, request: Request) -> Response:
        body: JoinBody = await self._order(request, _join_body)
        return await self._answered(self._administered.join_group(request.path_params["name"], body.target))

    async def _order(self, request: Request, decoder: msgspec.json.Decoder[Any]) -> Any:
        """The body of an order, checked. Raises: ApiError."""
        self.check(request)
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "Send the order as content-type: application/json.", code="unsupported_media_type")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_WAIT_S):
                async for part in request.stream():
                    body += part
                    if len(body) > BODY_BYTES_MAX:
                        raise ApiError(413, f"The body of an order may have {BODY_BYTES_MAX} bytes.", code="request_too_large")
        except TimeoutError:
            raise ApiError(408, f"The body did not come within {BODY_WAIT_S:g} s.", code="body_timeout") from None
        try:
            return decoder.decode(bytes(body) or b"{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"The body cannot be used: {error}") from error

    async def _answered(self, order: Any) -> Response:
        """An order that takes longer than its caller waits goes on: half a move is worse than a late one."""
        task: asyncio.Task[Any] = asyncio.create_task(order)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(ORDER_WAIT_S):
                return _json(await asyncio.shield(task))
        except TimeoutError:
            raise ApiError(504, f"Not done within {ORDER_WAIT_S:g} s; see /admin/state.", code="deadline", reason="deadline") from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not self._shared.is_draining or current is None:
                raise
            current.uncancel()  # the server's patience is at its end: who ordered is told so
            raise shutting_down() from None
        except OrderRefused as refused:
            raise ApiError(STATUS_OF[refused.reason], str(refused), code=refused.reason, reason="invalid") from refused

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: of one that nobody waits for any more, the log of moves tells


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), 200, {"cache-control": "no-store"}, media_type="application/json")
