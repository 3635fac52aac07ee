"""Fitted alpha and beta, and the choice made with them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from runtime.torch_tp.communicators.hierarchical import CheaperWay
from runtime.torch_tp.link_cost import LinkCost
from runtime.torch_tp.link_probe import measure_all_reduce
from tests.runtime.torch_tp.fake_communicator import fake_group
from tests.runtime.torch_tp.test_fake import on_all


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
def test_exact_times_give_their_alpha_and_beta(alpha_s, beta_s_per_byte):
    sizes = (2048, 32768, 524288, 1 << 22)
    fitted = LinkCost.fit(sizes, [alpha_s + beta_s_per_byte * size for size in sizes])
    for size in sizes:
        assert fitted.time_s(size) == pytest.approx(alpha_s + beta_s_per_byte * size, rel=1e-6)


def test_times_that_fall_with_size_give_no_negative_beta():
    fitted = LinkCost.fit((1000, 2000), (3e-4, 2e-4))
    assert fitted.beta_s_per_byte == 0.0 and 2e-4 < fitted.alpha_s < 3e-4
    assert LinkCost.fit((1000, 100_000), (1e-6, 2e-4)).alpha_s == 0.0


def test_one_size_is_not_enough():
    with pytest.raises(ValueError, match="at least two sizes"):
        LinkCost.fit((1000, 1000), (1e-4, 2e-4))


def test_the_cheaper_way_changes_at_the_crossing():
    """300 us + 1 ns per byte against 100 us + 3 ns: equal at 100,000 bytes."""
    way = CheaperWay({"flat": LinkCost(300e-6, 1e-9), "hierarchical": LinkCost(100e-6, 3e-9)})
    assert [way(99_000), way(101_000)] == ["hierarchical", "flat"]


def test_all_ranks_get_the_same_figures():
    found = on_all(fake_group(3), lambda communicator: measure_all_reduce(communicator, (64, 4096), 3))
    assert found[0] == found[1] == found[2]
    assert [entry.size_bytes for entry in found[0]] == [64, 4096]
    assert all(0 < entry.time_s_p50 <= entry.time_s_p99 for entry in found[0])
