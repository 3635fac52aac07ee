"""When a request counts as timed out for its class's breaker; one rule for simulation and service."""

from __future__ import annotations

from envs.decision.predictor import class_limits


class ClassTimeouts:
    """A first token later than `timeout_limits` x the class's TTFT limit (itself x limit_multiplier) came too late."""

    def __init__(self, limit_multiplier: float, timeout_limits: float) -> None:
        self._limits: list[list[float]] = (class_limits(limit_multiplier)[:, :2] * timeout_limits).tolist()

    def is_late(self, class_index: int, prompt_tokens: int, ttft_s: float) -> bool:
        """O(1), plain numbers."""
        base_s, per_token_s = self._limits[class_index]
        return ttft_s > base_s + per_token_s * prompt_tokens
