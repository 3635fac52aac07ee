"""The live page at `/ui`: a few static files. No build step, no foreign host.

The files hold no secret and need no key; all that they show comes from the admin endpoints, which do.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.gateway.errors import ApiError

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    # nothing but this service's own files, nothing inline, in nobody's frame
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    data: bytes
    media_type: str
    tag: str


def _files() -> dict[str, _File]:
    found = {}
    for entry in resources.files("runtime.gateway").joinpath("ui").iterdir():
        kind = TYPES.get("." + entry.name.rpartition(".")[2])
        if kind is not None:
            data = entry.read_bytes()
            found[entry.name] = _File(data, f"{kind}; charset=utf-8", f'"{hashlib.sha256(data).hexdigest()[:24]}"')
    return found


class Page:
    """`routes` for an application that turns ApiError into an answer."""

    def __init__(self) -> None:
        self._files = _files()

    @property
    def routes(self) -> list[Route]:
        return [Route("/ui", self.file, methods=["GET"]), Route("/ui/{name}", self.file, methods=["GET"])]

    async def file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        file = self._files.get(name)
        if file is None:
            raise ApiError(404, f"Invalid URL ({request.method} {request.url.path[:200]})", code="unknown_url", reason="not_found")
        headers = HEADERS | {"etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers=headers, media_type=file.media_type)
