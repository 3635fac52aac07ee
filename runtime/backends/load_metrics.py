"""The load that a server's metrics page tells: vLLM's names, old and new, and SGLang's (Gateway-API model-server protocol)."""

from __future__ import annotations

import re
from dataclasses import dataclass

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "num_queue_reqs")
KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "token_usage")
COUNT_MAX = 1e9
_LINE = re.compile(rf"^({'|'.join((*RUNNING, *WAITING, *KV_USED))})(?:\{{.*\}})?[ \t]+(\S+)", re.MULTILINE)
"""Found without looking at each line: a page of megabytes must not hold the event loop up."""


@dataclass(frozen=True, slots=True)
class Load:
    running: int
    waiting: int
    kv_used_fraction: float | None


def load_of(page: str) -> Load | None:
    """Sums over engines of requests, the fullest engine's KV; None where the page tells no requests. What can be no count is left out."""
    sums: dict[str, float] = {}
    fullest: dict[str, float] = {}
    for name, value in _LINE.findall(page):
        try:
            number = float(value)
        except ValueError:
            continue
        if 0.0 <= number <= COUNT_MAX:  # not of NaN
            sums[name] = sums.get(name, 0.0) + number
            fullest[name] = max(fullest.get(name, 0.0), min(number, 1.0))
    running = next((sums[name] for name in RUNNING if name in sums), None)
    if running is None:
        return None
    waiting = next((sums[name] for name in WAITING if name in sums), 0.0)
    return Load(int(running), int(waiting), next((fullest[name] for name in KV_USED if name in fullest), None))
