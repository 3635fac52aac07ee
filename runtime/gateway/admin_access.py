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
    if client is None or not _is_loopback(client[0]):
        raise ApiError(403, "Without API keys this answers to loopback alone; set api_keys_env.", code="forbidden", reason="unauthorised")
    # a page of another site whose name was made to mean this machine, or a proxy here that speaks for others
    if not _is_loopback(_host_of(request.headers.get("host", ""))):
        raise ApiError(
            403, "Without API keys this answers to localhost and loopback addresses alone (Host is another); set api_keys_env.",
            code="forbidden", reason="unauthorised",
        )  # fmt: skip


def _host_of(header: str) -> str:
    """A Host header without its port."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


def _is_loopback(host: str) -> bool:
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"The body is not JSON that can be used: {error}.") from error
    if not isinstance(order, dict):
        raise invalid("The body must be a JSON object.")
    return order
