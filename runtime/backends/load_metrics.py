"""The load that a server's metrics page tells: vLLM's names, old and new, and SGLang's (Gateway-API model-server protocol)."""

from __future__ import annotations

from dataclasses import dataclass

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "num_queue_reqs")
KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "token_usage")


@dataclass(frozen=True, slots=True)
class Load:
    running: int
    waiting: int
    kv_used_fraction: float | None


def load_of(page: str) -> Load | None:
    """Sums over engines of requests, the fullest engine's KV; None where the page tells no requests."""
    sums: dict[str, float] = {}
    fullest: dict[str, float] = {}
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        name = name.split("{", 1)[0].strip()
        try:
            number = float(value)
        except ValueError:
            continue
        if number == number and name in (*RUNNING, *WAITING, *KV_USED):
            sums[name] = sums.get(name, 0.0) + number
            fullest[name] = max(fullest.get(name, 0.0), number)
    running = next((sums[name] for name in RUNNING if name in sums), None)
    if running is None:
        return None
    waiting = next((sums[name] for name in WAITING if name in sums), 0.0)
    return Load(int(running), int(waiting), next((fullest[name] for name in KV_USED if name in fullest), None))
