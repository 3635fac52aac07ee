"""Writing a safetensors file tensor by tensor: a model need not fit in memory to be converted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import numpy as np

ALIGNMENT_BYTES = 64


def write_float32(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write `tensors` (in the order of `shapes`) as float32, holding one at a time; the first starts on a 64-byte boundary."""
    header: dict[str, object] = {}
    offset = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + 4 * prod(shape)]}
        offset += 4 * prod(shape)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), (got, array) in zip(shapes.items(), tensors, strict=True):
            assert name == got and array.shape == shape and array.dtype == np.float32
            file.write(np.ascontiguousarray(array).data)
        file.flush()
        os.fsync(file.fileno())
