"""The packed wire keeps to the error it states."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis.extra.numpy import arrays

from runtime.torch_tp.communicators.wire_codec import CODECS, codec_of
from tests.runtime.torch_tp.wire_bounds import error_bound

PARTS = st.integers(1, 200).flatmap(
    lambda count: st.lists(arrays(np.float32, count, elements=st.floats(-(2.0**100), 2.0**100, width=32)), min_size=1, max_size=3)
)


@pytest.mark.parametrize("wire", ["fp16", "int8"])
@settings(max_examples=150, deadline=None)
@given(parts=PARTS)
@example(parts=[np.zeros(65, np.float32), np.full(65, 1e-42, np.float32)])
@example(parts=[np.full(64, 65504.0, np.float32), np.linspace(-1e6, 1e6, 64, dtype=np.float32)])
@example(parts=[np.array([1.0, 1e-8, -3.0], np.float32)])
def test_sums_are_within_the_stated_bound(wire, parts):
    """Against float64 sums; 2^-22 of the parts' sizes for the float32 arithmetic, and the smallest normal number, which scales flush to."""
    codec = CODECS[wire]
    tensors = [torch.from_numpy(part) for part in parts]
    found = codec.add_up([codec.pack(tensor) for tensor in tensors], len(parts[0])).double()
    exact = torch.stack(tensors).double().sum(0)
    rounding = torch.stack(tensors).double().abs().sum(0) * 2.0**-22 + 2.0**-110
    assert bool(((found - exact).abs() <= error_bound(wire, tensors).double() * (1 + 1e-6) + rounding).all())


@pytest.mark.parametrize(("wire", "share"), [("fp16", 0.51), ("int8", 0.28)])
def test_packed_bytes(wire, share):
    assert CODECS[wire].pack(torch.randn(6400)).numel() <= 4 * 6400 * share


def test_the_bound_is_not_idle():
    """Errors come near it, so it is not a bound that anything would keep: half a step of int8, half a unit in the last place of fp16."""
    numbers = torch.rand(64 * 200, generator=torch.Generator().manual_seed(1)) + 1.0
    for wire, codec in CODECS.items():
        error = (codec.add_up([codec.pack(numbers)], numbers.numel()) - numbers).abs()
        assert float((error / error_bound(wire, [numbers])).max()) > 0.9


def test_numbers_that_are_not_finite():
    bad = torch.tensor([1.0, float("inf"), float("nan")])
    with pytest.raises(ValueError, match="not finite"):
        CODECS["int8"].pack(bad)
    unpacked = CODECS["fp16"].add_up([CODECS["fp16"].pack(bad)], 3)
    assert unpacked[0] == 1.0 and unpacked[1].isinf() and unpacked[2].isnan()


def test_an_unknown_wire_lists_the_known():
    assert codec_of("float32") is None
    with pytest.raises(ValueError, match="wire 'int4' unknown; known: float32, fp16, int8"):
        codec_of("int4")
