"""How much of a step's compute time was waiting for memory: an estimate, since no counter says so in user space."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from runtime.torch_tp import row_kernels
from runtime.torch_tp.config import ModelConfig
from runtime.torch_tp.shares import RankShare

CACHED_ROWS, CACHED_COLUMNS = 64, 512
"""A matrix of 128 KiB: it stays in a core's second-level cache."""
ROWS_MEASURED_MAX = 64
REPEATS = 5


class MemoryStall:
    """Compute time minus what the same multiplications take on cached operands. On a CPU only; elsewhere the estimate is 0.

    The rate on cached operands is measured once per process and row count, with the code that the step uses, in a millisecond.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config, self._is_cpu = config, device.type == "cpu"

    def estimate_s(self, share: RankShare, batches: Sequence[tuple[int, int]], compute_s: float) -> float:
        """batches: (rows, rows that want logits) of each. Never negative, never more than `compute_s`."""
        if not self._is_cpu:
            return 0.0
        layer_flop, head_flop = flop_per_row(self._config, share)
        arithmetic_s = 0.0
        for rows, logit_rows in batches:
            arithmetic_s += layer_flop * rows / _rate(rows) + (head_flop * logit_rows / _rate(logit_rows) if logit_rows else 0.0)
        return max(0.0, compute_s - arithmetic_s)


def _rate(rows: int) -> float:
    return cached_flop_per_s(min(row_kernels.padded_rows(rows), ROWS_MEASURED_MAX))


def flop_per_row(config: ModelConfig, share: RankShare) -> tuple[float, float]:
    """(all layers, output head): floating-point operations of one row's matrix products; attention itself is left out."""
    heads = sum(query.width + kv.width for query, kv in zip(share.query, share.kv, strict=True))
    columns = sum(mlp.width for mlp in share.mlp)
    return 4.0 * config.hidden * config.head_dim * heads + 6.0 * config.hidden * columns, 2.0 * config.hidden * share.vocabulary.width


@cache  # bounded by ROWS_MEASURED_MAX
def cached_flop_per_s(rows: int) -> float:
    """Rate of rows x (64, 512) products that find their operands in cache: by kernel for few rows, else by torch."""
    x = np.ones((rows, CACHED_COLUMNS), dtype=np.float32)
    weight = np.ones((CACHED_ROWS, CACHED_COLUMNS), dtype=np.float32)
    out = np.empty((rows, CACHED_ROWS), dtype=np.float32)
    x_torch, weight_torch = torch.from_numpy(x), torch.from_numpy(weight)
    best_s = float("inf")
    for _ in range(REPEATS):
        started_s = time.thread_time()
        for _ in range(4):
            if rows <= row_kernels.ROWS_MAX:
                row_kernels.rows_times(x, weight, 0, CACHED_ROWS, 0, CACHED_COLUMNS, out, 0)
            else:
                torch.nn.functional.linear(x_torch, weight_torch)
        best_s = min(best_s, (time.thread_time() - started_s) / 4)
    return 2.0 * rows * CACHED_ROWS * CACHED_COLUMNS / max(best_s, 1e-9)
