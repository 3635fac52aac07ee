"""Orders about what decides: `/admin/reload` and `/admin/rollout…`. What they do is the service's; `app.state` holds who does it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from envs.domain.suggestions import unknown_name
from runtime.gateway.admin_access import check_access, order_of
from runtime.gateway.errors import ApiError, invalid
from runtime.gateway.generation import Generation

ACTOR = "operator"


def admin_rollout_routes(shared: Generation) -> list[Route]:
    """The routes, for any application whose state holds `reloader` and `rollout` (None: not there)."""

    async def reload(request: Request) -> Response:
        _fields(await order_of(request, shared), {})
        return _json({"changed": await _done(_part(request, "reloader").reload())})

    async def status(request: Request) -> Response:
        check_access(request, shared)
        rollout = request.app.state.rollout
        return _json({"stage": "off", "next_step": "set rollout.dir in the service file"} if rollout is None else await rollout.status())

    async def start(request: Request) -> Response:
        kinds = {"bundle": str, "evaluation": str, "incumbent_evaluation": str}
        order = _fields(await order_of(request, shared), kinds, ("bundle", "evaluation"))
        other = order.get("incumbent_evaluation")
        rollout = _part(request, "rollout")
        return _json(await _done(rollout.begin(Path(order["bundle"]), Path(order["evaluation"]), Path(other) if other else None, ACTOR)))

    async def promote(request: Request) -> Response:
        order = _fields(await order_of(request, shared), {"reason": str, "force": bool})
        rollout = _part(request, "rollout")
        return _json(await _done(rollout.promote(ACTOR, order.get("reason", ""), bool(order.get("force")))))

    async def rollback(request: Request) -> Response:
        order = _fields(await order_of(request, shared), {"reason": str})
        return _json(await _done(_part(request, "rollout").roll_back(ACTOR, order.get("reason", ""))))

    orders: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
        "/admin/reload": reload,
        "/admin/rollout/start": start,
        "/admin/rollout/promote": promote,
        "/admin/rollout/rollback": rollback,
    }
    return [Route("/admin/rollout", status, methods=["GET"]), *(Route(path, order, methods=["POST"]) for path, order in orders.items())]


def _part(request: Request, name: str) -> Any:
    part = getattr(request.app.state, name)
    if part is None:
        raise ApiError(404, f"This service has no {name}; for rollouts set rollout.dir in the service file.", code="not_configured")
    return part


async def _done(order: Awaitable[Any]) -> Any:
    """What came of an order. Raises: ApiError 409 with the one line that says why it was not carried out."""
    try:
        return await order
    except ValueError as error:  # RolloutError and ReloadRefused are ValueErrors
        raise ApiError(409, str(error), code="refused") from error


def _fields(order: dict[str, Any], kinds: Mapping[str, type], needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Raises: ApiError 400 for a field that is unknown, missing, of another type or too long."""
    for name, value in order.items():
        if name not in kinds:
            raise invalid(unknown_name("field", str(name)[:64], kinds), str(name)[:64])
        if not isinstance(value, kinds[name]) or (isinstance(value, str) and len(value) > 4096):
            raise invalid(f"'{name}' must be a {kinds[name].__name__} of at most 4096 characters.", name)
    for name in needed:
        if name not in order:
            raise invalid(f"'{name}' is missing.", name)
    return order


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers={"cache-control": "no-store"})
