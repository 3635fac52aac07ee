"""Who may ask: bearer keys, compared so that the time taken tells nothing about them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from runtime.gateway.errors import ApiError

CHALLENGE = (b"www-authenticate", b"Bearer")


class ApiKeys:
    """The keys that open the service; without any it is open."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    @property
    def are_set(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: bytes | None) -> None:
        """Raises: ApiError 401 unless `authorization` is "Bearer KEY" with a known key.

        Digests of equal length are compared, and all of them each time: neither a key's length nor its place shows.
        """
        if not self._digests:
            return
        if authorization is None or authorization[:7].lower() != b"bearer ":
            raise ApiError(
                401, "You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY'.", code="missing_api_key",
                reason="unauthorised", headers=[CHALLENGE],
            )  # fmt: skip
        digest = hashlib.sha256(authorization[7:].strip()).digest()
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(digest, known)
        if not is_known:
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key", reason="unauthorised", headers=[CHALLENGE])
