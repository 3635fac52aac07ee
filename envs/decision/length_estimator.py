"""How long answers will be: per class, a histogram of finished lengths over 24 bins, begun from published statistics.

Knows only what has finished: no request's own future. Memory is fixed: classes x 24 weights, whatever the traffic. Within a
bin every length is taken as equally likely. Reading is a bin search and a few sums, compiled, on `tables()`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from envs.domain.requests import CLASS_INDEX, SERVICE_CLASSES
from envs.domain.snapshot import FloatArray, IntArray
from envs.perf_model.kernel_cache import cached_njit

BIN_EDGES: IntArray = np.array(
    [1, 2, 4, 6, 9, 13, 20, 32, 48, 64, 96, 128, 176, 256, 320, 384, 448, 576, 768, 1024, 1536, 2560, 4608, 9216, 32768]
)  # fmt: skip
"""Bin k holds lengths BIN_EDGES[k] to BIN_EDGES[k + 1] - 1 tokens; longer answers are counted in the last bin.

Logarithmic, and finer from 256 to 576: chat answers crowd near 400, and one bin there overrates their mean by 5 %."""

BINS = len(BIN_EDGES) - 1

# Rows of one class in `tables()`, each of length BINS + 1.
(T_EDGE, T_SURVIVAL, T_AREA) = range(3)
TABLE_ROWS = 3

_Mixture = tuple[tuple[float, float, float], ...]  # (weight, mu, sigma) of lognormals, natural logarithm

OUTPUT_MIXTURES: dict[str, _Mixture] = {
    "chat": ((0.425, 4.57, 0.36), (0.296, 4.73, 1.01), (0.279, 6.01, 0.05)),
    "code": ((0.180, 1.97, 0.16), (0.520, 2.53, 0.35), (0.300, 3.70, 0.88)),
    "batch": ((0.352, 5.03, 0.79), (0.609, 5.11, 0.43), (0.039, 7.89, 0.26)),
}
"""Output tokens. Sources: fits to the Azure 2023 conversation and code traces (Patel et al., Splitwise, ISCA 2024) and to the
arXiv summarization lengths of microsoft/vidur; Kolmogorov-Smirnov distance to the data .03, .06 and .01."""

TAIL_SHARE = 1e-3
"""Share of every prior spread over all bins as 1 / length, so that no length is ever impossible and what is left of an answer
longer than any seen is of the order of what it has (a Pareto tail), not of the largest bin."""


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


def mixture_weights(mixture: _Mixture) -> FloatArray:
    """Probability of each bin under a mixture of lognormals, shape (BINS,); the last bin takes everything above."""
    inner = [sum(w * _normal_cdf((math.log(edge) - mu) / sigma) for w, mu, sigma in mixture) for edge in BIN_EDGES[1:-1]]
    cdf = np.array([0.0, *inner, 1.0])
    tail = 1.0 / BIN_EDGES[:-1]
    weights: FloatArray = (1.0 - TAIL_SHARE) * np.diff(cdf) + TAIL_SHARE * tail / tail.sum()
    return weights


@cached_njit()
def fill_table(weights: FloatArray, table: FloatArray) -> None:
    """Fill one class's table (TABLE_ROWS, BINS + 1) in place from its bin weights (BINS,), which need no common sum.

    T_SURVIVAL[k] = P(L >= edge k); T_AREA[k] = sum of P(L >= n) over n >= edge k = E[max(0, L - edge k + 1)].
    """
    total = 0.0
    for k in range(weights.size):
        total += weights[k]
    table[1, weights.size] = 0.0
    table[2, weights.size] = 0.0
    for k in range(weights.size - 1, -1, -1):
        share = weights[k] / total
        width = table[0, k + 1] - table[0, k]
        table[1, k] = table[1, k + 1] + share
        table[2, k] = table[2, k + 1] + width * table[1, k + 1] + share * (width + 1.0) / 2.0


@cached_njit()
def _bin_of(table: FloatArray, length: float) -> int:
    low, high = 0, table.shape[1] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if table[0, middle] <= length:
            low = middle
        else:
            high = middle
    return low


@cached_njit()
def count_answer(weights: FloatArray, floor: FloatArray, keep: float, tables: FloatArray, class_index: int, tokens: int) -> None:
    """Let the class's weights fade by `keep`, not below `floor`, and count one answer of `tokens`, in place."""
    for k in range(weights.shape[1]):
        weights[class_index, k] = max(weights[class_index, k] * keep, floor[class_index, k])
    weights[class_index, _bin_of(tables[class_index], float(tokens))] += 1.0


@cached_njit()
def remaining_mean(table: FloatArray, generated: int) -> float:
    """Expected further tokens of an answer that has `generated` tokens and goes on; at least 1. `table`: one class's."""
    following = generated + 1.0  # the smallest length it can still have
    if following >= table[0, -1]:
        return 1.0
    k = _bin_of(table, following)
    share = (table[1, k] - table[1, k + 1]) / (table[0, k + 1] - table[0, k])
    count = table[0, k + 1] - following
    survival = table[1, k + 1] + share * count
    if survival <= 0.0:
        return 1.0
    area = table[2, k + 1] + count * table[1, k + 1] + share * count * (count + 1.0) / 2.0
    return float(max(1.0, area / survival))


@cached_njit()
def remaining_quantile(table: FloatArray, generated: int, uniform: float) -> int:
    """Further tokens, at least 1, of an answer that has `generated` tokens and goes on: its distribution at `uniform` in [0, 1).

    L is the largest n with P(L >= n) >= v, v = P(L > generated) x (1 - uniform): then P(L >= n) is as the table has it.
    """
    following = generated + 1.0
    if following >= table[0, -1]:
        return 1
    k = _bin_of(table, following)
    width = table[0, k + 1] - table[0, k]
    survival = table[1, k + 1] + (table[1, k] - table[1, k + 1]) / width * (table[0, k + 1] - following)
    level = survival * (1.0 - uniform)
    low, high = k, table.shape[1] - 1  # survival[low] >= level > survival[high]
    while high - low > 1:
        middle = (low + high) // 2
        if table[1, middle] >= level:
            low = middle
        else:
            high = middle
    share = (table[1, low] - table[1, low + 1]) / (table[0, low + 1] - table[0, low])
    length = table[0, low]
    if share > 0.0:
        length = table[0, low + 1] - math.ceil((level - table[1, low + 1]) / share - 1e-9)
    length = min(max(length, table[0, low], following), table[0, low + 1] - 1.0)
    return int(length) - generated


@cached_njit()
def _means(tables: FloatArray, class_index: IntArray, generated: IntArray, out: FloatArray) -> None:
    for i in range(class_index.size):
        out[i] = remaining_mean(tables[class_index[i]], generated[i])


@cached_njit()
def _quantiles(tables: FloatArray, class_index: IntArray, generated: IntArray, uniform: FloatArray, out: IntArray) -> None:
    for i in range(class_index.size):
        out[i] = remaining_quantile(tables[class_index[i]], generated[i], uniform[i])


class LengthEstimator:
    """Output lengths per class, learnt from those that finished.

    prior_answers: how many observed answers the published prior is worth. half_life_answers: after so many answers of its
    class an observation (and the prior) counts half, so that the estimate follows the traffic.
    """

    def __init__(self, prior_answers: float = 50.0, half_life_answers: float = 2000.0) -> None:
        if prior_answers <= 0 or half_life_answers <= 0:
            raise ValueError(f"LengthEstimator: prior_answers={prior_answers} and half_life_answers={half_life_answers} must be positive")
        shares = np.array([mixture_weights(OUTPUT_MIXTURES[service.name]) for service in SERVICE_CLASSES])
        self._weights = prior_answers * shares
        # A thousandth of the prior never fades: no bin, and so no conditional mean, is ever without weight.
        self._floor = self._weights * 1e-3
        self._keep = 0.5 ** (1.0 / half_life_answers)
        self._tables = np.zeros((len(SERVICE_CLASSES), TABLE_ROWS, BINS + 1))
        self._tables[:, T_EDGE] = BIN_EDGES
        self._is_stale = np.ones(len(SERVICE_CLASSES), dtype=np.bool_)
        self.observed = np.zeros(len(SERVICE_CLASSES), dtype=np.int64)

    def observe(self, class_index: int, output_tokens: int) -> None:
        """An answer of the class finished with so many tokens. Raises ValueError below 1: drop rows without output (K15)."""
        if output_tokens < 1:
            raise ValueError(f"LengthEstimator: output_tokens={output_tokens} of a finished answer must be at least 1")
        count_answer(self._weights, self._floor, self._keep, self._tables, class_index, output_tokens)
        self.observed[class_index] += 1
        self._is_stale[class_index] = True

    def tables(self) -> FloatArray:
        """Lookup tables, shape (classes, TABLE_ROWS, BINS + 1), rows T_EDGE, T_SURVIVAL, T_AREA; valid until `observe`.

        For compiled code: `remaining_mean(tables[c], generated)`, `remaining_quantile(tables[c], generated, uniform)`.
        """
        for class_index in np.flatnonzero(self._is_stale):
            fill_table(self._weights[class_index], self._tables[class_index])
            self._is_stale[class_index] = False
        return self._tables

    def mean(self, class_index: int) -> float:
        """Expected output tokens of a new request of the class."""
        return float(remaining_mean(self.tables()[class_index], 0))

    def expected_remaining(self, class_index: npt.ArrayLike, generated: npt.ArrayLike) -> FloatArray:
        """Expected further tokens given that `generated` were made and the answer goes on; inputs broadcast, at least 1."""
        classes, made = np.broadcast_arrays(np.asarray(class_index, dtype=np.int64), np.asarray(generated, dtype=np.int64))
        out = np.empty(classes.size)
        _means(self.tables(), classes.ravel(), made.ravel(), out)
        return out.reshape(classes.shape)

    def sample_remaining(self, class_index: npt.ArrayLike, generated: npt.ArrayLike, uniform: npt.ArrayLike) -> IntArray:
        """Further tokens drawn given that `generated` were made, from `uniform` in [0, 1); inputs broadcast, at least 1.

        Equal numbers give equal draws: pass the same ones to two candidates and they are compared on common lengths.
        """
        classes, made, levels = np.broadcast_arrays(
            np.asarray(class_index, dtype=np.int64), np.asarray(generated, dtype=np.int64), np.asarray(uniform, dtype=np.float64)
        )
        out = np.empty(classes.size, dtype=np.int64)
        _quantiles(self.tables(), classes.ravel(), made.ravel(), levels.ravel(), out)
        return out.reshape(classes.shape)


assert set(OUTPUT_MIXTURES) == set(CLASS_INDEX), "every class needs a prior"
