"""Compiled kernels against numpy in float64: products of every block size, norms, the exponential."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.torch_tp import row_kernels
from runtime.torch_tp.memory_stall import cached_flop_per_s


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("rows", "padded"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (32, 32)])
def test_products_of_a_range_of_rows_and_columns(rows, padded):
    """Part of the columns, part of the rows, written at an offset; widths that are no multiple of a vector."""
    assert row_kernels.padded_rows(rows) == padded
    x, weight = normal(padded, 70), normal(40, 90, seed=1)
    out = np.full((padded, 30), np.nan, dtype=np.float32)
    row_kernels.rows_times(x, weight, 5, 28, 13, 80, out, 4)
    expected = x[:, :67].astype(np.float64) @ weight[5:28, 13:80].astype(np.float64).T
    np.testing.assert_allclose(out[:, 4:27], expected, atol=1e-4)
    assert np.isnan(out[:, :4]).all() and np.isnan(out[:, 27:]).all()


def test_exponential_over_its_whole_range():
    """Within 2e-7 of the true value from -86.9 to 88, 0 below -87.1, 1 at 0; lengths around the vector width."""
    for length in (1, 7, 8, 100_003):
        x = np.linspace(-86.9, 88.0, length, dtype=np.float32)
        expected = np.exp(x.astype(np.float64))
        row_kernels.exp_in_place(x, np.empty(length, dtype=np.int32))
        np.testing.assert_allclose(x, expected, rtol=2e-7)
    edges = np.array([-1e30, -np.inf, -87.2, 0.0], dtype=np.float32)
    row_kernels.exp_in_place(edges, np.empty(4, dtype=np.int32))
    assert edges.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_norm_pads_with_zeros():
    x, weight = normal(3, 50), normal(50, seed=2)
    out = np.full((4, 50), np.nan, dtype=np.float32)
    row_kernels.rms_normed(x, weight, np.float32(1e-5), out)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(out[:3], wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight, atol=1e-5)
    assert (out[3] == 0).all()


def test_mlp_is_finite_for_extreme_inputs():
    """SiLU of ±1e4 neither overflows nor turns into NaN: it is the input itself, or 0. Every `up` is the third input, 3."""
    x = np.array([[1e4, -1e4, 3.0]], dtype=np.float32)
    unit = np.eye(3, dtype=np.float32)
    gate, up, partial = (np.zeros((1, 3), dtype=np.float32) for _ in range(3))
    nothing = np.empty(0, dtype=np.float32)
    third = np.array([[0, 0, 1]] * 3, dtype=np.float32)
    row_kernels.mlp_part(x, (unit, third, unit), (nothing, nothing), 0, 3, (gate, up), np.empty(3, dtype=np.int32), partial)
    silu = x.astype(np.float64) / (1 + np.exp(-np.clip(x.astype(np.float64), -700, 700)))
    np.testing.assert_allclose(partial, silu * 3, rtol=1e-6, atol=1e-6)


def test_rate_on_cached_operands_is_a_rate():
    """Faster for eight rows than for one (each weight is used eight times), and within what a core can do."""
    one, eight = cached_flop_per_s(1), cached_flop_per_s(8)
    assert 1e8 < one < 1e12 and 1e8 < eight < 1e12
