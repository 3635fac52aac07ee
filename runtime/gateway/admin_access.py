"""Who may give orders: the holder of an API key or, where there are no keys, whoever asks from this machine."""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec
from starlette.requests import Request

from runtime.gateway.errors import ApiError, invalid
from runtime.gateway.generation import Generation
from runtime.gateway.request_headers import RequestHeaders

BODY_BYTES_MAX = 1 << 16


def check_access(request: Request, shared: Generation) -> None:
    """Raises: ApiError 401 without a known key, 403 from elsewhere where there are no keys."""
    if shared.settings.api_keys:
        shared.keys.check(RequestHeaders.of(request.scope["headers"]).authorization)
        return
    client = request.scope.get("client")
    try:
        is_here = client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        is_here = False
    if not is_here:
        raise ApiError(403, "Without API keys this answers to loopback alone; set api_keys_env.", code="forbidden", reason="unauthorised")


async def order_of(request: Request, shared: Generation) -> dict[str, Any]:
    """The JSON object that a POST carries, {} for an empty body. Raises: ApiError.

    Its type must be JSON: a page of another site cannot send that through somebody's browser unasked.
    """
    check_access(request, shared)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "Send it with 'content-type: application/json'.", reason="invalid")
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES_MAX:
            raise ApiError(413, f"The body may have {BODY_BYTES_MAX} bytes.", code="request_too_large", reason="too_large")
    try:
        order = msgspec.json.decode(data or b"{}")
    except msgspec.DecodeError as error:
        raise invalid(f"The body is not JSON: {error}.") from error
    if not isinstance(order, dict):
        raise invalid("The body must be a JSON object.")
    return order
