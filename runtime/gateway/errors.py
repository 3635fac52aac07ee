"""Errors as the OpenAI API words them: status, headers and the JSON object, for an answer's body or for an event in a stream."""

from __future__ import annotations

import math

import msgspec

from runtime.calls import Refusal

Headers = list[tuple[bytes, bytes]]

JSON_TYPE = (b"content-type", b"application/json")
CODE_OF_REASON: dict[str, str | None] = {"invalid": None, "too_long": "context_length_exceeded"}
"""Where the API's word for a refusal's reason is not the reason itself."""


class ApiError(Exception):
    """What a caller is told instead of an answer. param: the field at fault. reason: for the counters."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        reason: str = "invalid",
        retry_after_s: float | None = None,
        headers: Headers | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.reason = status, message, param, code, reason
        self.retry_after_s = retry_after_s
        self.extra_headers = headers or []

    @property
    def kind(self) -> str:
        """The API's `type`."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def json(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": sendable(self.message), "type": self.kind, "param": self.param, "code": self.code}}
        )

    def headers(self, retry_after_s: float) -> Headers:
        """retry_after_s: for a 429 or 503 that names no time. Our own retries are spent by now: an SDK shall not multiply them."""
        headers = [JSON_TYPE, *self.extra_headers]
        if self.status in (429, 503):
            wait_s = retry_after_s if self.retry_after_s is None else min(max(self.retry_after_s, 0.0), 86400.0)
            headers += [
                (b"retry-after", b"%d" % max(1, math.ceil(wait_s))),
                (b"retry-after-ms", b"%d" % math.ceil(wait_s * 1e3)),
            ]
        if self.status == 429 or self.status >= 500:
            headers.append((b"x-should-retry", b"false"))
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that the caller must change."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(model: str) -> ApiError:
    return ApiError(
        404, f"The model `{model}` does not exist or you do not have access to it.", param="model", code="model_not_found",
        reason="model_not_found",
    )  # fmt: skip


def from_refusal(refusal: Refusal) -> ApiError:
    return ApiError(
        refusal.status if 400 <= refusal.status <= 599 else 500,
        refusal.message,
        code=CODE_OF_REASON.get(refusal.reason, refusal.reason),
        reason=refusal.reason,
        retry_after_s=refusal.retry_after_s,
    )


def internal_error() -> ApiError:
    """Ours to mend; what happened is in the log, not in the answer."""
    return ApiError(500, "The server had an error while processing your request.", code="internal_error", reason="internal_error")


def sendable(text: str) -> str:
    """The text with "?" for what UTF-8 cannot carry (lone surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
