"""The few request headers that mean something here, each bounded, found in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from runtime.gateway.errors import invalid

WANTED = frozenset(
    (
        b"authorization", b"content-length", b"x-request-id", b"x-priority", b"x-service-class", b"x-session-id", b"x-user-id",
        b"x-request-timeout-s", b"x-smaller-model", b"traceparent",
    )
)  # fmt: skip
REQUEST_ID_CHARS_MAX = 128


class RequestHeaders(msgspec.Struct, frozen=True):
    """Of each wanted header the first value, as it came."""

    values: dict[bytes, bytes]

    @classmethod
    def of(cls, raw: Iterable[tuple[bytes, bytes]]) -> RequestHeaders:
        values: dict[bytes, bytes] = {}
        for name, value in raw:
            if name in WANTED and name not in values:
                values[name] = value
        return cls(values)

    @property
    def authorization(self) -> bytes | None:
        return self.values.get(b"authorization")

    @property
    def request_id(self) -> str | None:
        """The caller's own id, where it is short and printable; others are not echoed, since they go into headers and logs."""
        value = self.values.get(b"x-request-id")
        if value is None or not 0 < len(value) <= REQUEST_ID_CHARS_MAX or not value.isascii():
            return None
        text = value.decode("ascii")
        return text if text.isprintable() else None

    @property
    def content_length(self) -> int | None:
        value = self.values.get(b"content-length")
        return int(value) if value is not None and value.isdigit() and len(value) < 20 else None

    @property
    def timeout_s(self) -> float | None:
        """Raises: ApiError 400 unless it is a positive number."""
        value = self.values.get(b"x-request-timeout-s")
        if value is None:
            return None
        try:
            timeout_s = float(value[:32])
        except ValueError:
            timeout_s = math.nan
        if not (math.isfinite(timeout_s) and timeout_s > 0.0):
            raise invalid("The header x-request-timeout-s must be a positive number of seconds.", "x-request-timeout-s")
        return timeout_s

    @property
    def priority(self) -> int | None:
        """Raises: ApiError 400 unless it is a whole number within -100 to 100."""
        value = self.values.get(b"x-priority")
        if value is None:
            return None
        try:
            priority = int(value[:8])
        except ValueError:
            priority = 101
        if not -100 <= priority <= 100:
            raise invalid("The header x-priority must be a whole number within -100 to 100 (higher goes first).", "x-priority")
        return priority

    @property
    def allows_smaller_model(self) -> bool:
        """Raises: ApiError 400 for a word that is not known: who wrote "off" must not be answered by another model after all."""
        value = self.values.get(b"x-smaller-model")
        if value is not None and value.strip().lower() != b"no":
            raise invalid("The header x-smaller-model can only be 'no'; leave it out to allow one.", "x-smaller-model")
        return value is None

    def text(self, name: bytes) -> str | None:
        value = self.values.get(name)
        return None if value is None else value.decode("latin-1")
