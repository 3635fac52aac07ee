"""Capability vectors against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from envs.decision import capability as C
from envs.domain.specs import GpuSpec, LinkSpec
from envs.domain.units import GB, GIB, TFLOP


def device(name, tflop, gib, gb_per_s, tdp_w=300.0):
    return GpuSpec(name, tflop * TFLOP, gib * GIB, gb_per_s * GB, tdp_w, "test", "a100", "link")


LINK = LinkSpec("link", 1e-6, 1 / (25 * GB))
A100 = device("A100", 312, 80, 2039)
L40S = device("L40S", 362, 48, 864)
H20 = device("H20", 148, 96, 4000)


def test_static_rates_hold_the_units_of_the_specs():
    rates = C.static_rates([A100], [LINK])
    np.testing.assert_allclose(rates, [[312e12, 80 * 2**30, 2039e9, 25e9, 300.0]])


def test_standardised_logs_of_two_devices_are_minus_and_plus_one():
    """Rates 1 and 4 (any unit): logs 0 and ln 4, mean ln 2, spread ln 2; so 1 -> -1, 4 -> +1, and 2 -> 0, 8 -> 2."""
    base = np.array([1e12, 8 * GIB, 1e11, 1e9, 100.0])
    scale = C.scale_of(np.stack([base, 4 * base]))
    assert scale.log_spread == pytest.approx([np.log(2)] * 5)
    vectors = C.static_vector(np.stack([base, 4 * base, 2 * base, 8 * base]), scale)
    np.testing.assert_allclose(vectors, np.outer([-1, 1, 0, 2], np.ones(5)), atol=1e-9)


def test_a_feature_equal_over_the_catalogue_stays_finite():
    rates = C.static_rates([A100, L40S], [LINK, LINK])  # same link and power
    vectors = C.static_vector(rates, C.scale_of(rates))
    np.testing.assert_allclose(vectors[:, 3:], 0.0, atol=1e-9)
    other = C.static_vector(C.static_rates([A100], [LinkSpec("fast", 0.0, 1 / (50 * GB))]), C.scale_of(rates))
    assert other[0, 3] == pytest.approx(np.log(2))


@pytest.mark.fault("K13")
def test_a_device_that_nothing_was_measured_of_is_usual():
    """An idle newcomer: empty memory -2, queue log2(1/9), the rest 0; all finite."""
    np.testing.assert_allclose(C.dynamic_vector([C.DeviceState()]), [[-2.0, -np.log2(9), 0.0, 0.0, 0.0]])


def test_dynamic_features_reach_plus_one_where_the_module_says():
    state = C.DeviceState(0.75, queue_depth=17, temperature_c=75.0, clock_fraction=0.9, step_ratio=1.25)
    np.testing.assert_allclose(C.dynamic_vector([state]), np.ones((1, 5)))


def test_capability_vector_puts_static_before_dynamic():
    rates = C.static_rates([A100, L40S], [LINK, LINK])
    states = [C.DeviceState(), C.DeviceState(queue_depth=8, memory_in_use_fraction=0.5)]
    vectors = C.capability_vector(rates, states, C.scale_of(rates))
    assert vectors.shape == (2, len(C.FEATURES))
    np.testing.assert_allclose(vectors[0, :3], [-1.0, 1.0, 1.0])  # L40S has more FLOP/s, A100 more of the rest
    np.testing.assert_allclose(vectors[1, 5:], 0.0)
    with pytest.raises(ValueError, match="one state per device"):
        C.capability_vector(rates, states[:1], C.scale_of(rates))


def test_similarity_is_the_cosine():
    """(1,0) and (1,1): cos 45 degrees; (1,0) and (-2,0): -1; the zero row has no direction: 0."""
    left = np.array([[1.0, 0.0], [0.0, 0.0]])
    right = np.array([[3.0, 0.0], [1.0, 1.0], [-2.0, 0.0], [0.0, 5.0]])
    np.testing.assert_allclose(C.similarity(left, right), [[1.0, np.sqrt(0.5), -1.0, 0.0], [0.0] * 4])


def test_rank_by_orders_and_breaks_ties_by_index():
    vectors = np.zeros((4, len(C.FEATURES)))
    vectors[:, C.FEATURES.index("memory_bytes_per_s")] = [1.0, 2.0, 2.0, 0.0]
    vectors[:, C.FEATURES.index("queue_depth")] = [0.0, 3.0, 3.0, 0.0]
    assert C.rank_by(vectors, {"memory_bytes_per_s": 1.0}).tolist() == [1, 2, 0, 3]
    assert C.rank_by(vectors, {"memory_bytes_per_s": 1.0, "queue_depth": -1.0}).tolist() == [0, 3, 1, 2]
    with pytest.raises(ValueError, match="queue_dept"):
        C.rank_by(vectors, {"queue_dept": 1.0})
    with pytest.raises(ValueError, match="no weights"):
        C.rank_by(vectors, {})


def test_pair_shares_and_complementarity_by_hand():
    """H20 + L40S: compute 148/510, bandwidth 4000/4864, memory 96/144; they differ by 0.822 - 0.290 = 0.532."""
    rates = C.static_rates([H20, L40S, H20], [LINK] * 3)
    np.testing.assert_allclose(C.pair_shares(rates)[0, 1], [148 / 510, 4000 / 4864, 96 / 144])
    between = C.complementarity(rates)
    assert between[0, 1] == pytest.approx(4000 / 4864 - 148 / 510)
    np.testing.assert_allclose(between, between.T)
    assert between[0, 2] == 0.0
    assert between[0, 1] > C.complementarity(C.static_rates([A100, L40S], [LINK] * 2))[0, 1]


def test_a_faster_twin_is_not_complementary():
    """Twice the compute and twice the bandwidth: both shares 1/3, so the same cut serves prefill and decode."""
    rates = C.static_rates([device("x", 100, 24, 500), device("y", 200, 24, 1000)], [LINK] * 2)
    assert C.complementarity(rates)[0, 1] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: C.DeviceState(memory_in_use_fraction=80e9), "not bytes"),
        (lambda: C.DeviceState(queue_depth=-1), "queue_depth=-1"),
        (lambda: C.DeviceState(step_ratio=0.0), "step_ratio=0.0"),
        (lambda: C.DeviceState(temperature_c=float("nan")), "temperature_c"),
        (lambda: C.static_rates([A100], []), "one link per device"),
        (lambda: C.scale_of(np.zeros((0, 5))), "no devices"),
        (lambda: C.scale_of(np.zeros((2, 5))), "positive"),
        (lambda: C.scale_of(np.ones((2, 4))), "static_rates"),
        (lambda: C.CapabilityScale((0.0,) * 5, (0.0,) * 5), "spreads"),
        (lambda: C.CapabilityScale((0.0,), (1.0,)), "one mean"),
    ],
)
def test_refusals_name_what_came(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_the_frozen_scale_is_near_the_catalogues():
    """0.3 in each log mean and a fifth of each spread: beyond that the features of new GPUs would leave their usual range."""
    from envs.scenario.catalogue import load_gpus, load_links

    gpus = list(load_gpus().values())
    scale = C.scale_of(C.static_rates(gpus, [load_links()[gpu.link] for gpu in gpus]))
    assert scale.log_mean == pytest.approx(C.CATALOGUE_SCALE.log_mean, abs=0.3)
    assert scale.log_spread == pytest.approx(C.CATALOGUE_SCALE.log_spread, rel=0.2)


def test_a_groups_rates_add_up_but_its_slowest_link_counts():
    rates = np.array([[1.0, 2.0, 3.0, 40.0, 5.0], [10.0, 20.0, 30.0, 4.0, 50.0]])
    assert C.group_rates(rates).tolist() == [11.0, 22.0, 33.0, 4.0, 55.0]
    with pytest.raises(ValueError, match="no ranks"):
        C.group_rates(rates[:0])


def test_the_compiled_profile_is_the_plain_one():
    """Twin of `capability_vector` and `similarity`, on groups with absent ranks, full pools and queues."""
    from envs.domain.snapshot import ClusterSnapshot

    rng = np.random.default_rng(1)
    groups = 6
    columns = dict.fromkeys(ClusterSnapshot._fields)
    columns |= {
        "is_up": np.ones(groups, bool),
        "static_profile": rng.normal(size=(groups, 5)),
        "waiting": rng.integers(0, 30, groups),
        "kv_blocks_free": rng.integers(0, 100, groups),
        "kv_blocks_total": np.full(groups, 100),
        "rank_ratio": rng.uniform(0.8, 2.0, (groups, 3)) * (rng.random((groups, 3)) < 0.7),
    }
    columns["rank_ratio"][:, 0] = 1.1
    view = ClusterSnapshot(**columns)
    need = rng.normal(size=10)
    profile, affinity = C.profile_and_affinity(view, need)
    expected = np.concatenate([view.static_profile, C.dynamic_vector(C.group_states(view))], axis=1)
    np.testing.assert_allclose(profile, expected, atol=1e-12)
    centred = expected.copy()
    centred[:, :5] -= centred[:, :5].mean(axis=0)
    np.testing.assert_allclose(affinity, C.similarity(centred, need[None])[:, 0], atol=1e-12)


def test_present_strength_by_hand():
    """Usual state: 1. Steps 25 % slower: 1 / 1.25. A queue of 17 (one unit): e^-0.2."""
    usual, slow, queued = np.zeros((3, 10))
    slow[C.FEATURES.index("step_time")] = 1.0
    queued[C.FEATURES.index("queue_depth")] = 1.0
    assert C.present_strength(np.stack([usual, slow, queued])) == pytest.approx([1.0, 0.8, np.exp(-0.2)])


def test_needs_of_classes_by_their_limits():
    """Equal prompts and answers: the class with the tighter TTFT limit needs more compute and link, the one with the tighter TPOT
    limit more bandwidth, all the same memory; twice the limit is ln 2 / spread less."""
    from envs.scenario.catalogue import model

    needs = C.class_needs(model("Llama-3.1-8B"), np.full(2, 500.0), np.full(2, 100.0), np.array([1.0, 2.0]), np.array([0.1, 0.05]))
    difference = needs[0] - needs[1]
    spread = C.CATALOGUE_SCALE.log_spread
    assert difference[:5] == pytest.approx([np.log(2) / spread[0], 0.0, -np.log(2) / spread[2], np.log(2) / spread[3], 0.0])
    assert needs[:, :5].sum(axis=0) == pytest.approx(np.zeros(5), abs=1e-9)
    assert (needs[:, 5:] == -1.0).all()
