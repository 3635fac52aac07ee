"""Compiled arithmetic for few rows on a CPU (decode): one call per half layer, weights read once, in place.

A BLAS is made for many rows: at one to eight it reads float32 weights at half the speed that one core can (measured: 6 to 8 of
12 GB/s), and two dozen small tensor operations per layer cost as much again. Here every matrix is the whole mapped one, C-contiguous,
and a share is a range of its rows or columns, so changing a plan changes numbers only. Rows are padded with zeros to whole token
blocks (`padded_rows`).

All arrays are float32 unless said; T is the rows of the step, P the padded rows. Nothing allocates (see `envs.perf_model.compiled`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from envs.perf_model.kernel_cache import cached_njit

ROWS_MAX = 32
"""Above this a BLAS is faster; callers take another path."""

_F = np.float32
_EXP_LOWEST = _F(-87.0)


_OPTIONS: dict[str, Any] = {"_nrt": False, "nogil": True, "error_model": "numpy"}


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Sums may be reordered and fused (that is what vectorises them); NaN and infinity keep their meaning."""
    compiled: Callable[..., Any] = cached_njit(**_OPTIONS, fastmath={"reassoc", "contract", "nsz"})(function)
    return compiled


def padded_rows(rows: int) -> int:
    """Rows rounded up to whole token blocks: 1, 2, 4, or multiples of 8."""
    return rows if rows <= 2 else 4 if rows <= 4 else -(-rows // 8) * 8


@intrinsic
def _slot_block(typing_context: Any, address: Any, heads: Any, room: Any, dim: Any) -> Any:
    """float32 array (2, heads, room, dim) at an int64 address: a slot's keys and values, which the caller keeps alive."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shape = [context.get_constant(types.intp, 2), *arguments[1:]]
        strides = [context.get_constant(types.intp, 4)]
        for extent in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], extent))
        array = context.make_array(signature.return_type)(context, builder)
        data = builder.inttoptr(arguments[0], ir.PointerType(ir.FloatType()))
        populate_array(array, data=data, shape=shape, strides=strides, itemsize=context.get_constant(types.intp, 4), meminfo=None)
        return array._getvalue()

    return types.Array(types.float32, 4, "C")(types.int64, types.intp, types.intp, types.intp), generate


@_kernel
def _copy(source, target):
    for i in range(source.shape[0]):
        target[i] = source[i]


@_kernel
def _dot1(w, x, out, first, column):
    x0 = x[first]
    a0 = _F(0)
    for i in range(w.shape[0]):
        a0 += w[i] * x0[i]
    out[first, column] = a0


@_kernel
def _dot2(w, x, out, first, column):
    x0, x1 = x[first], x[first + 1]
    a0 = a1 = _F(0)
    for i in range(w.shape[0]):
        a0 += w[i] * x0[i]
        a1 += w[i] * x1[i]
    out[first, column], out[first + 1, column] = a0, a1


@_kernel
def _dot4(w, x, out, first, column):
    x0, x1, x2, x3 = x[first], x[first + 1], x[first + 2], x[first + 3]
    a0 = a1 = a2 = a3 = _F(0)
    for i in range(w.shape[0]):
        a0 += w[i] * x0[i]
        a1 += w[i] * x1[i]
        a2 += w[i] * x2[i]
        a3 += w[i] * x3[i]
    out[first, column], out[first + 1, column], out[first + 2, column], out[first + 3, column] = a0, a1, a2, a3


@_kernel
def _dot8(w, x, out, first, column):
    x0, x1, x2, x3 = x[first], x[first + 1], x[first + 2], x[first + 3]
    x4, x5, x6, x7 = x[first + 4], x[first + 5], x[first + 6], x[first + 7]
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = _F(0)
    for i in range(w.shape[0]):
        wi = w[i]
        a0 += wi * x0[i]
        a1 += wi * x1[i]
        a2 += wi * x2[i]
        a3 += wi * x3[i]
        a4 += wi * x4[i]
        a5 += wi * x5[i]
        a6 += wi * x6[i]
        a7 += wi * x7[i]
    out[first, column], out[first + 1, column], out[first + 2, column], out[first + 3, column] = a0, a1, a2, a3
    out[first + 4, column], out[first + 5, column], out[first + 6, column], out[first + 7, column] = a4, a5, a6, a7


@_kernel
def rows_times(x, weight, row_start, row_end, column_start, column_end, out, out_start):
    """out[:, out_start + r] = x[:, :width] @ weight[row_start + r, column_start:column_end] for every row r of the range.

    x: (P, at least width = column_end - column_start); out: (P, at least out_start + rows). One pass over the weights.
    """
    rows = x.shape[0]
    for row in range(row_start, row_end):
        w = weight[row, column_start:column_end]
        column = out_start + row - row_start
        if rows == 1:
            _dot1(w, x, out, 0, column)
        elif rows == 2:
            _dot2(w, x, out, 0, column)
        elif rows == 4:
            _dot4(w, x, out, 0, column)
        else:
            for first in range(0, rows, 8):
                _dot8(w, x, out, first, column)


@_kernel
def _add_bias(out, start, bias, bias_start, bias_end):
    if bias.shape[0] == 0:
        return
    for t in range(out.shape[0]):
        for i in range(bias_end - bias_start):
            out[t, start + i] += bias[bias_start + i]


@_kernel
def rms_normed(x, weight, eps, out):
    """out = x / sqrt(mean(x²) + eps) * weight per row; rows of `out` beyond x are zero."""
    for t in range(x.shape[0]):
        total = _F(0)
        for i in range(x.shape[1]):
            total += x[t, i] * x[t, i]
        scale = _F(1) / np.sqrt(total / _F(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] * scale * weight[i]
    for t in range(x.shape[0], out.shape[0]):
        out[t, :] = _F(0)


@_kernel
def _norm_head(head, weight, eps):
    total = _F(0)
    for i in range(head.shape[0]):
        total += head[i] * head[i]
    scale = _F(1) / np.sqrt(total / _F(head.shape[0]) + eps)
    for i in range(head.shape[0]):
        head[i] = head[i] * scale * weight[i]


@_kernel
def _rotate(head, cos, sin):
    """In place; the sine's first half carries the minus sign (see `rope.RopeTable`)."""
    half = head.shape[0] // 2
    for i in range(half):
        low, high = head[i], head[half + i]
        head[i] = low * cos[i] + high * sin[i]
        head[half + i] = high * cos[half + i] + low * sin[half + i]


@_kernel
def exp_in_place(x, bits):
    """x = exp(x) for x <= 88, within 2e-7 relative; below -87 it gives 0. `bits` is int32 scratch of the same length.

    Source: Cephes expf (range reduction by ln 2 in two parts, polynomial of degree 5), written so that it vectorises.
    """
    for i in range(x.shape[0]):
        value = x[i]
        power = np.floor(value * _F(1.44269504) + _F(0.5))
        bits[i] = np.int32(power if power > _F(-127.0) else _F(-127.0))
        r = value - power * _F(0.693359375) + power * _F(2.12194440e-4)
        p = _F(1.9875691500e-4)
        p = p * r + _F(1.3981999507e-3)
        p = p * r + _F(8.3334519073e-3)
        p = p * r + _F(4.1665795894e-2)
        p = p * r + _F(1.6666665459e-1)
        p = p * r + _F(5.0000001201e-1)
        p = p * r * r + r + _F(1)
        x[i] = p if value > _EXP_LOWEST else _F(0)
    for i in range(x.shape[0]):
        bits[i] = (bits[i] + np.int32(127)) << np.int32(23)
    scale = bits.view(np.float32)
    for i in range(x.shape[0]):
        x[i] *= scale[i]


@cached_njit(**_OPTIONS, fastmath={"nnan", "nsz"})  # a maximum only vectorises where NaN need not be looked for
def _highest(row):
    highest = row[0]
    for i in range(row.shape[0]):
        highest = row[i] if row[i] > highest else highest
    return highest


@_kernel
def _attend_one(query, key, value, tokens, scale, scores, bits, out):
    """Attention of the queries of one KV head to `tokens` keys. query, out: (padded group, dim); key, value: (tokens, dim)."""
    rows_times(query, key, 0, tokens, 0, key.shape[1], scores, 0)
    for g in range(query.shape[0]):
        row = scores[g, :tokens]
        highest = _highest(row)
        for l in range(tokens):
            row[l] = (row[l] - highest) * scale
        exp_in_place(row, bits[:tokens])
        total = _F(0)
        for l in range(tokens):
            total += row[l]
        inverse = _F(1) / total
        done = out[g]
        done[:] = _F(0)
        for l in range(tokens):
            weight = row[l] * inverse
            line = value[l]
            for i in range(line.shape[0]):
                done[i] += weight * line[i]


@_kernel
def causal_softmax(scores, chunk, start, scale, bits):
    """Softmax of scale * scores in place; row r is of the token at position start + r % chunk and sees the positions up to its own.

    scores: (matrices, rows, end); what lies behind a row's position becomes 0. bits: int32 scratch of `end`.
    """
    for m in range(scores.shape[0]):
        for r in range(scores.shape[1]):
            seen = start + r % chunk + 1
            row = scores[m, r, :seen]
            highest = _highest(row)
            for i in range(seen):
                row[i] = (row[i] - highest) * scale
            exp_in_place(row, bits[:seen])
            total = _F(0)
            for i in range(seen):
                total += row[i]
            inverse = _F(1) / total
            for i in range(seen):
                row[i] *= inverse
            scores[m, r, seen:] = _F(0)


@_kernel
def attention_part(
    x, weights, biases, head_norms, ranges, head_dim, eps, cos, sin, addresses, rooms, positions, scratch, bits, partial
):  # fmt: skip
    """One rank's attention: projections, rotation, KV store, attention, output projection into `partial` (P, hidden).

    x: normed hidden (P, hidden). weights: (query, key, value, output), whole matrices. biases: three, each maybe empty.
    head_norms: (query, key), maybe empty. ranges: (query start, end, KV start, end), in heads. cos, sin: (T, head_dim).
    addresses, rooms, positions: int64 per row: the slot's block of this layer (2, KV heads, rooms, head_dim), its tokens, the
    row's position. Every row's key is stored before any row attends, so a chunk of one sequence may lie in several rows.
    scratch: (queries, keys, values, group queries, group out, scores), see `RowStep`.
    """
    w_query, w_key, w_value, w_output = weights
    q0, q1, k0, k1 = ranges
    queries, keys, values, group_queries, group_out, scores = scratch
    dim, rows, heads, kv_heads = head_dim, positions.shape[0], q1 - q0, k1 - k0
    group = w_query.shape[0] // w_key.shape[0]
    rows_times(x, w_query, q0 * dim, q1 * dim, 0, x.shape[1], queries, 0)
    rows_times(x, w_key, k0 * dim, k1 * dim, 0, x.shape[1], keys, 0)
    rows_times(x, w_value, k0 * dim, k1 * dim, 0, x.shape[1], values, 0)
    _add_bias(queries, 0, biases[0], q0 * dim, q1 * dim)
    _add_bias(keys, 0, biases[1], k0 * dim, k1 * dim)
    _add_bias(values, 0, biases[2], k0 * dim, k1 * dim)
    for t in range(rows):
        for h in range(heads):
            head = queries[t, h * dim : (h + 1) * dim]
            if head_norms[0].shape[0]:
                _norm_head(head, head_norms[0], eps)
            _rotate(head, cos[t], sin[t])
        block = _slot_block(addresses[t], kv_heads, rooms[t], dim)
        for h in range(kv_heads):
            head = keys[t, h * dim : (h + 1) * dim]
            if head_norms[1].shape[0]:
                _norm_head(head, head_norms[1], eps)
            _rotate(head, cos[t], sin[t])
            _copy(head, block[0, h, positions[t]])
            _copy(values[t, h * dim : (h + 1) * dim], block[1, h, positions[t]])
    scale = _F(1) / np.sqrt(_F(dim))
    for t in range(rows):
        block = _slot_block(addresses[t], kv_heads, rooms[t], dim)
        for h in range(kv_heads):
            first, last = max((k0 + h) * group, q0), min((k0 + h + 1) * group, q1)
            if last <= first:  # kept for a neighbour: stored above, read by none of this rank's queries
                continue
            for g in range(last - first):
                _copy(queries[t, (first - q0 + g) * dim : (first - q0 + g + 1) * dim], group_queries[g])
            # rows of group_queries beyond last - first are stale but finite; what they give is not read
            count = last - first
            padded = count if count <= 2 else 4 if count <= 4 else -(-count // 8) * 8
            _attend_one(group_queries[:padded], block[0, h], block[1, h], positions[t] + 1, scale, scores, bits, group_out)
            for g in range(count):
                _copy(group_out[g], queries[t, (first - q0 + g) * dim : (first - q0 + g + 1) * dim])
    rows_times(queries, w_output, 0, w_output.shape[0], q0 * dim, q1 * dim, partial, 0)


@_kernel
def _gate(gate, up, bits):
    """up = silu(gate) * up; gate is lost."""
    for i in range(gate.shape[0]):
        up[i] *= gate[i]
        gate[i] = -gate[i] if gate[i] < _F(88.0) else _F(-88.0)
        gate[i] = gate[i] if gate[i] < _F(88.0) else _F(88.0)
    exp_in_place(gate, bits)
    for i in range(gate.shape[0]):
        up[i] /= _F(1) + gate[i]


@_kernel
def gated(gate, up, bits):
    """up = silu(gate) * up for all rows, in place; gate is lost. bits: int32 scratch of one row."""
    for t in range(gate.shape[0]):
        _gate(gate[t], up[t], bits)


@_kernel
def rotate(heads, cos, sin):
    """Rotary embedding in place; heads (rows, heads, dim), cos and signed sin (rows, dim)."""
    for t in range(heads.shape[0]):
        for h in range(heads.shape[1]):
            _rotate(heads[t, h], cos[t], sin[t])


@_kernel
def mlp_part(x, weights, biases, start, end, scratch, bits, partial):
    """One rank's MLP columns [start, end): gate, up, SiLU, down into `partial` (P, hidden). weights: (gate, up, down), whole."""
    w_gate, w_up, w_down = weights
    gate, up = scratch
    width = end - start
    rows_times(x, w_gate, start, end, 0, x.shape[1], gate, 0)
    rows_times(x, w_up, start, end, 0, x.shape[1], up, 0)
    _add_bias(gate, 0, biases[0], start, end)
    _add_bias(up, 0, biases[1], start, end)
    for t in range(x.shape[0]):
        _gate(gate[t, :width], up[t, :width], bits[:width])
    rows_times(up, w_down, 0, w_down.shape[0], start, end, partial, 0)
