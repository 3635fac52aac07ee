"""The gateway's limits and habits: every field that a caller fills has a bound here or in `openai_schemas`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.setting_bounds import Bounds, check_bounds

MIB = 1 << 20
API_KEYS_MAX = 64
FIXED = ("tokeniser_threads", "has_old_metric_names")
"""Settings that hold for the life of a gateway."""
COUNT: Bounds = (1, 1_000_000)
WAIT_S: Bounds = (0.001, 1e6)
BOUNDS: Mapping[str, Bounds] = {
    "body_bytes_max": (1, 1 << 40), "body_bytes_in_flight_max": (1, 1 << 40), "requests_max": COUNT, "choices_max": COUNT,
    "messages_max": COUNT, "stop_strings_max": COUNT, "stop_chars_max": COUNT, "logprobs_max": (0, 64), "name_chars_max": COUNT,
    "output_tokens_default": COUNT, "tokeniser_threads": (1, 256), "body_wait_s": WAIT_S,
    "request_timeout_s": WAIT_S, "deadline_grace_s": WAIT_S, "ready_wait_s": WAIT_S,
    "retry_after_s": WAIT_S,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Times in s, sizes in bytes unless the name says otherwise.

    api_keys: any of them opens /v1; none: open to all. metrics_needs_key: /metrics too. body_bytes_max: of one request.
    body_bytes_in_flight_max: of all requests being served. body_wait_s: until a body is here in full. requests_max: served at once, streams
    included. choices_max: prompts × n of one request. output_tokens_default: of a chat answer without a limit of its own, where the context
    has room. request_timeout_s: longest answer; a caller may ask for less by header. deadline_grace_s: what a dispatcher gets to say itself
    that the deadline passed. ready_wait_s: how long /ready waits for the dispatcher. retry_after_s: where a refusal names none.
    tokeniser_threads: prompts made to tokens at once. has_old_metric_names: vLLM's former names beside today's.
    """

    api_keys: tuple[str, ...] = ()
    metrics_needs_key: bool = False
    body_bytes_max: int = 4 * MIB
    body_bytes_in_flight_max: int = 256 * MIB
    body_wait_s: float = 30.0
    requests_max: int = 4096
    choices_max: int = 32
    messages_max: int = 2048
    stop_strings_max: int = 8
    stop_chars_max: int = 128
    logprobs_max: int = 20
    name_chars_max: int = 256
    output_tokens_default: int = 1024
    request_timeout_s: float = 600.0
    deadline_grace_s: float = 1.0
    ready_wait_s: float = 2.0
    retry_after_s: float = 1.0
    tokeniser_threads: int = 2
    has_old_metric_names: bool = True

    def __post_init__(self) -> None:
        check_bounds(self, BOUNDS)
        are_good = all(isinstance(key, str) and key and key.isascii() and key.isprintable() for key in self.api_keys)
        if len(self.api_keys) > API_KEYS_MAX or not are_good:
            raise ValueError(f"GatewaySettings: api_keys must be at most {API_KEYS_MAX} non-empty keys of printable ASCII")
