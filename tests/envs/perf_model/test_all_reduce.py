"""All-reduce costs against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.domain.plans import RankPlace, TpGroup
from envs.domain.specs import GpuSpec, LinkSpec, ModelSpec
from envs.domain.units import GIB
from envs.perf_model.all_reduce import affine_coefficients, cheaper, flat_s, hierarchical_s
from envs.perf_model.coefficients import profile

MODEL = ModelSpec("m", layers=2, hidden=64, query_heads=8, kv_heads=8, head_dim=8, mlp_width=128, vocabulary=100)
FAST = LinkSpec("fast", alpha_s=1e-6, beta_s_per_byte=1e-11)
SLOW = LinkSpec("slow", alpha_s=20e-6, beta_s_per_byte=1e-9)


def gpu(kernel_profile: str = "a100") -> GpuSpec:
    return GpuSpec("g", 312e12, 80 * GIB, 2e12, 400.0, "Ampere", kernel_profile, "nvlink3")


def group(nodes: list[int], inner: LinkSpec = FAST, outer: LinkSpec = SLOW, kernel_profile: str = "a100") -> TpGroup:
    """A group with nodes[i] ranks on node i."""
    places = tuple(RankPlace(gpu(kernel_profile), node=f"n{i}") for i, count in enumerate(nodes) for _ in range(count))
    return TpGroup("t", MODEL, places, inner, outer)


def test_ring_of_four_by_hand():
    """4 ranks: 6 steps of 10 us, and 6/4 of 1 MB at 1 ns a byte = 1.5 ms: 1.56 ms."""
    assert flat_s(1e6, 4, 10e-6, 1e-9) == pytest.approx(1.56e-3, rel=1e-12)


def test_one_rank_reduces_nothing():
    assert flat_s(1e6, 1, 10e-6, 1e-9) == 0.0
    assert affine_coefficients(group([1])) == (0.0, 0.0, False)


def test_hierarchical_by_hand():
    """Two nodes of 4: inside 6 * 1 us + 1.5 * 1e6 * 1e-11 = 21 us; between 2 * 20 us + 1e6 * 1e-9 = 1040 us; sum 1061 us."""
    assert hierarchical_s(1e6, np.array([4, 4]), 1e-6, 1e-11, 20e-6, 1e-9) == pytest.approx(1061e-6, rel=1e-12)


def test_largest_domain_decides_inside():
    """Domains of 1 and 4 cost inside what 4 alone cost: they work at once."""
    uneven = hierarchical_s(1e6, np.array([1, 4]), 1e-6, 1e-11, 20e-6, 1e-9)
    assert uneven == pytest.approx(1061e-6, rel=1e-12)


def test_two_nodes_prefer_hierarchy_by_hand():
    """8 ranks, slow link between: flat 14 * 20 us + 1.75 * 262144 * 1 ns = 738.8 us; tree 46 us + 262144 * (1.5e-11 + 1e-9)."""
    cost = affine_coefficients(group([4, 4]))
    assert cost.hierarchical
    assert cost.alpha_s == pytest.approx(46e-6)
    assert cost.beta_s_per_byte == pytest.approx(1.015e-9)


def test_flat_wins_where_the_hierarchy_only_adds_steps():
    """One rank a node leaves nothing to reduce inside; then both forms are the same ring."""
    cost = affine_coefficients(group([1, 1, 1, 1]))
    assert cost.alpha_s == pytest.approx(6 * 20e-6) and cost.beta_s_per_byte == pytest.approx(1.5e-9)


def test_flat_wins_when_inner_and_outer_are_alike_and_messages_large():
    """2 nodes of 2, one kind of link, 1 GB: flat 1.5 beta; tree (1 + 1) beta."""
    cost = affine_coefficients(group([2, 2], inner=SLOW), reference_bytes=1e9)
    assert not cost.hierarchical
    assert cost.beta_s_per_byte == pytest.approx(1.5e-9)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    message=st.floats(1.0, 1e9),
    inner=st.tuples(st.floats(1e-7, 1e-4), st.floats(1e-12, 1e-9)),
    outer=st.tuples(st.floats(1e-7, 1e-4), st.floats(1e-12, 1e-8)),
)
def test_affine_form_and_cheaper_agree_with_the_closed_forms(sizes, message, inner, outer):
    """alpha + beta * b at the reference size is min(flat, tree) there, in plain Python."""
    cost = affine_coefficients(group(sizes, LinkSpec("i", *inner), LinkSpec("o", *outer)), reference_bytes=message)

    def ring(ranks: int, alpha_s: float, beta: float) -> float:
        return 2 * (ranks - 1) * alpha_s + 2 * (ranks - 1) / ranks * beta * message

    flat = ring(sum(sizes), max(inner[0], outer[0]), max(inner[1], outer[1]))
    tree = ring(max(sizes), *inner) + ring(len(sizes), *outer)
    assert cost.alpha_s + cost.beta_s_per_byte * message == pytest.approx(min(flat, tree), rel=1e-9)
    assert cheaper(message, np.array(sizes), *inner, *outer) == pytest.approx(min(flat, tree), rel=1e-9)


def test_half_of_a_link_doubles_the_byte_time_not_the_latency():
    whole, half = affine_coefficients(group([4])), affine_coefficients(group([4]), scale=0.5)
    assert half.alpha_s == whole.alpha_s
    assert half.beta_s_per_byte == pytest.approx(2 * whole.beta_s_per_byte)


def test_measured_latency_replaces_the_ring_on_the_measured_link():
    """A100s on NVLink 3: 5-6 us at 4 ranks (aiconfigurator, CUDA graph) against 6 steps of 2.8 us = 16.8 us in a ring."""
    nvlink = LinkSpec("nvlink3", 2.8e-6, 1 / 285e9)
    cost = affine_coefficients(group([4], inner=nvlink))
    assert 4.5e-6 < cost.alpha_s < 6.5e-6
    assert cost.beta_s_per_byte == pytest.approx(profile("a100").all_reduce_beta_s_per_byte[1])
    eager = affine_coefficients(group([4], inner=nvlink), eager=True)
    assert 40e-6 < eager.alpha_s < 50e-6  # 45 us in the table


def test_a_degraded_nvlink_keeps_its_declared_bandwidth():
    """A link declared ten times slower than the measured one must not be sped up by the measurement."""
    slow = LinkSpec("nvlink3", 2.8e-6, 10 / 285e9)
    assert affine_coefficients(group([4], inner=slow)).beta_s_per_byte == pytest.approx(1.5 * 10 / 285e9)


def test_unlike_ranks_or_another_link_fall_back_to_the_ring():
    nvlink = LinkSpec("nvlink3", 2.8e-6, 1 / 285e9)
    mixed = TpGroup("t", MODEL, (RankPlace(gpu("a100"), "n"), RankPlace(gpu("l40s"), "n")), nvlink, SLOW)
    assert affine_coefficients(mixed).alpha_s == pytest.approx(2 * 2.8e-6)
    assert affine_coefficients(group([2])).alpha_s == pytest.approx(2e-6)


def test_pcie_host_lends_latency_only():
    """The measured L40S host moved 2.5 GB/s; a declared PCIe link keeps its own bandwidth."""
    pcie = LinkSpec("pcie4", 6.5e-6, 1 / 25e9)
    cost = affine_coefficients(group([4], inner=pcie, kernel_profile="l40s"))
    assert cost.beta_s_per_byte == pytest.approx(1.5 / 25e9)
    assert 11e-6 < cost.alpha_s < 15e-6  # 13 us in the table


@pytest.mark.parametrize(("scale", "size"), [(0.0, 1.0), (1.5, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_nonsense_is_refused(scale, size):
    with pytest.raises(ValueError, match="must"):
        affine_coefficients(group([4]), scale=scale, reference_bytes=size)
