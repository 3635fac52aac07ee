"""How many retries may be under way at once: a share of the active requests, so that retries cannot multiply an outage.

Leaves to others which failures may be retried, and where the retry goes (never to the group that just failed, K25).
"""

from __future__ import annotations


class RetryBudget:
    """Counts active attempts and retries. Every method is O(1), and nothing is kept per request.

    active_share: retries under way are at most this share of all active attempts, or `retries_min` if that is more (Envoy's
    retry budget: 20 %, minimum 3). attempts_max: attempts of one request, the first included.
    """

    def __init__(self, active_share: float = 0.2, retries_min: int = 3, attempts_max: int = 3) -> None:
        if not 0.0 <= active_share <= 1.0 or retries_min < 0 or attempts_max < 1:
            raise ValueError(
                f"RetryBudget: active_share={active_share} must be in [0, 1], retries_min={retries_min} >= 0 and "
                f"attempts_max={attempts_max} >= 1"
            )
        self.active_share = active_share
        self.retries_min = retries_min
        self.attempts_max = attempts_max
        self.active = 0
        self.retrying = 0
        self.granted = 0
        self.denied = 0

    @property
    def retries_limit(self) -> int:
        """Retries that may be under way now."""
        return max(self.retries_min, int(self.active_share * self.active))

    def start_request(self) -> None:
        """A first attempt begins."""
        self.active += 1

    def try_start_retry(self, attempts: int, attempts_max: int | None = None) -> bool:
        """Ask to send a request again that has had `attempts`; when True, a retry has begun and `finish` must follow.

        The failed attempt is finished first: at this moment it counts no more. attempts_max: of this request, where it is not as others.
        """
        if attempts >= (self.attempts_max if attempts_max is None else attempts_max) or self.retrying >= self.retries_limit:
            self.denied += 1
            return False
        self.active += 1
        self.retrying += 1
        self.granted += 1
        return True

    def finish(self, is_retry: bool) -> None:
        """An attempt ended, however it ended: answered, failed, cancelled. Once per started attempt, in a `finally`.

        Raises: RuntimeError when more attempts end than began; a count below zero would hand out retries without limit.
        """
        if self.active < 1 or (is_retry and self.retrying < 1):
            raise RuntimeError(
                f"RetryBudget: finish(is_retry={is_retry}) with active={self.active}, retrying={self.retrying}; "
                "finish each started attempt exactly once"
            )
        self.active -= 1
        if is_retry:
            self.retrying -= 1
