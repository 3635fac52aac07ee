"""Loads a rank's compiled code before its first call, so that those forked after it have it: else each one reads it from disk (45 ms)."""

from __future__ import annotations

from numba import types

from runtime.torch_tp import row_kernels

_ROW, _MATRIX, _CUBE = (types.Array(types.float32, dimensions, "C") for dimensions in (1, 2, 3))
_BITS, _PLACES = types.Array(types.int32, 1, "C"), types.Array(types.int64, 1, "C")
_INT, _FLOAT = types.int64, types.float32


def _tuple(kind: types.Type, count: int) -> types.Type:
    return types.UniTuple(kind, count)


SIGNATURES = {
    row_kernels.rows_times: (_MATRIX, _MATRIX, _INT, _INT, _INT, _INT, _MATRIX, _INT),
    row_kernels.rms_normed: (_MATRIX, _ROW, _FLOAT, _MATRIX),
    row_kernels.causal_softmax: (_CUBE, _INT, _INT, _FLOAT, _BITS),
    row_kernels.attention_part: (
        _MATRIX, _tuple(_MATRIX, 4), _tuple(_ROW, 3), _tuple(_ROW, 2), _tuple(_INT, 4), _INT, _FLOAT, _MATRIX, _MATRIX,
        _PLACES, _PLACES, _PLACES, _tuple(_MATRIX, 6), _BITS, _MATRIX,
    ),
    row_kernels.gated: (_MATRIX, _MATRIX, _BITS),
    row_kernels.rotate: (_CUBE, _MATRIX, _MATRIX),
    row_kernels.mlp_part: (_MATRIX, _tuple(_MATRIX, 3), _tuple(_ROW, 2), _INT, _INT, _tuple(_MATRIX, 2), _BITS, _MATRIX),
}  # fmt: skip
"""As a rank of a float32 model on a CPU calls them; others are loaded, or compiled, at their first call."""


def load() -> None:
    """Runs none of them, and starts no thread."""
    for kernel, signature in SIGNATURES.items():
        kernel.compile(signature)
