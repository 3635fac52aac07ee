"""The packaged coefficients: shape, provenance, physics, and agreement with the tables they were fitted to."""

from __future__ import annotations

import copy
import json
import os
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from envs.perf_model.coefficients import load_profiles, parse_profiles, profile, residual_at

NAMES = ("a100", "a40", "b200", "h100", "l4", "l40s", "rtx4090", "rtxpro6000", "t4", "v100")
PEAKS = {  # datasheet FLOP/s (dense 16-bit) and bytes/s
    "a100": (312e12, 2039e9),
    "a40": (149.7e12, 696e9),
    "b200": (2250e12, 7700e9),
    "h100": (989.5e12, 3350e9),
    "l4": (121e12, 300e9),
    "l40s": (362e12, 864e9),
    "rtx4090": (165.2e12, 1008e9),
    "rtxpro6000": (467.8e12, 1792e9),
    "t4": (65e12, 320e9),
    "v100": (125e12, 900e9),
}


@pytest.fixture(scope="module")
def document():
    return json.loads((resources.files("envs.perf_model") / "coefficients.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def data() -> Path:
    root = os.environ.get("BALLAST_SHARED")
    folder = (Path(root) if root else Path(__file__).resolve().parents[4] / "shared") / "calibration"
    if not (folder / "gpu_specs.csv").exists():
        pytest.skip(f"timing tables not found in {folder}; set BALLAST_SHARED to the folder that holds calibration/")
    return folder


def test_every_promised_profile_is_there():
    assert tuple(sorted(load_profiles())) == NAMES


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match='did you mean "l40s"'):
        profile("l40")


@pytest.mark.parametrize("name", NAMES)
def test_provenance_names_repository_commit_licence_rows_and_script(name):
    for text in profile(name).provenance.values():
        assert "@" in text and "rows" in text and "calibration/fit_coefficients.py" in text
        assert "MIT" in text or "Apache-2.0" in text


@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_measured_or_says_whose_it_is(name):
    """Attention, small kernels and host time are either in provenance or in borrowed, never both, never neither."""
    found = profile(name)
    for family in ("attention", "elementwise", "step"):
        assert (family in found.provenance) != (family in found.borrowed), family


@pytest.mark.parametrize("name", NAMES)
def test_held_out_errors_are_stated_and_the_residual_table_earns_its_place(name):
    """On rows never fitted, the table beats the bare roofline; errors are fractions, median below p90."""
    errors = profile(name).held_out_error
    for error in errors.values():
        assert 0.0 <= error["median"] <= error["p90"] and error["rows"] >= 3
    assert errors["gemm"]["mean"] < errors["gemm_plain"]["mean"]
    assert errors["gemm"]["mean"] < 0.13


@pytest.mark.parametrize("name", ["a100", "h100", "a40"])
def test_unseen_models_are_within_seven_percent(name):
    assert profile(name).held_out_error["gemm_unseen_model"]["mean"] < 0.07


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_whole_decode_iterations_are_within_three_percent_once_the_host_is_counted(name):
    """The gap that op tables hide: operations alone miss 30 % and more of an eager engine's decode iteration."""
    errors = profile(name).held_out_error
    assert errors["eager_decode_operations_only"]["mean"] > 0.3
    assert errors["eager_decode_iteration"]["mean"] < 0.03


def test_residual_is_linear_between_powers_of_two_and_flat_beyond():
    """Between 2 and 4 tokens, sqrt(8) lies half way in log2: the mean of 3 and 5; beyond either end the end value."""
    table = (1.0, 3.0, 5.0)
    assert residual_at(table, 8**0.5) == pytest.approx(4.0)
    assert residual_at(table, np.array([0.0, 1.0, 4.0, 1e9])) == pytest.approx([1.0, 1.0, 5.0, 5.0])


@pytest.mark.parametrize("name", NAMES)
def test_layer_time_never_falls_as_tokens_grow(name):
    """One layer of Llama-70B at TP 4, every power of two: the table must not bend time backwards (five digits are kept)."""
    flop_per_s, bytes_per_s = PEAKS[name]
    found = profile(name)
    numbers = 856e6 / 4
    tokens = 2.0 ** np.arange(15)
    roof_s = np.maximum(
        2 * numbers * tokens / (flop_per_s * found.compute_efficiency), 2 * numbers / (bytes_per_s * found.memory_efficiency)
    )
    layer_s = residual_at(found.gemm_residual, tokens) * roof_s + 4 * found.gemm_overhead_s
    assert (layer_s[1:] / layer_s[:-1] > 0.9999).all(), layer_s[1:] / layer_s[:-1]


@pytest.mark.parametrize("name", [name for name in NAMES if profile(name).all_reduce_ranks])
def test_more_ranks_wait_longer_and_graphs_beat_eager(name):
    found = profile(name)
    alphas = found.all_reduce_alpha_s
    assert list(alphas) == sorted(alphas)
    assert all(eager >= graph for graph, eager in zip(alphas, found.all_reduce_eager_alpha_s, strict=True))


def test_all_reduce_between_measured_counts_lies_between_and_outside_is_unknown():
    found = profile("a100")
    two, three, four = (found.all_reduce_affine(ranks) for ranks in (2, 3, 4))
    assert three == pytest.approx(((two[0] + four[0]) / 2, (two[1] + four[1]) / 2))
    assert found.all_reduce_affine(16) is None and found.all_reduce_affine(1) is None and profile("t4").all_reduce_affine(2) is None


def test_eager_host_waits_for_launches_by_hand():
    """80 layers at the decode floor, when the device needs less; the device's time when it needs more."""
    host = profile("a100").eager
    assert host.step_s(1e-3, 80, 0, False) == pytest.approx(80 * host.decode_floor_s_per_layer + host.base_s)
    assert host.step_s(1.0, 80, 2, False) == pytest.approx(1.0 + host.base_s + 2 * host.per_sequence_s)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.pop("memory_efficiency"), "missing keys .'memory_efficiency'"),
        (lambda entry: entry.update(colour=1.0), "unknown keys .'colour'"),
        (lambda entry: entry.update(memory_efficiency=float("nan")), "no finite number"),
        (lambda entry: entry.update(memory_efficiency="0.8"), "no finite number"),
        (lambda entry: entry.update(compute_efficiency=1.5), "compute_efficiency"),
        (lambda entry: entry.update(gemm_overhead_s=5.0), "milliseconds"),
        (lambda entry: entry.update(gemm_residual=[1.0] * 14), "15 entries"),
        (lambda entry: entry.update(decode_residual=[0.0] * 18), "measured / roofline"),
        (lambda entry: entry["all_reduce_alpha_s"].pop(), "one entry per rank count"),
        (lambda entry: entry["held_out_error"]["gemm"].pop("p90"), "held_out_error"),
        (lambda entry: entry["provenance"].pop("gemm"), "provenance"),
    ],
)
def test_a_damaged_file_is_refused_with_the_field_named(document, change, message):
    damaged = copy.deepcopy(document)
    change(damaged["profiles"]["a100"])
    with pytest.raises(ValueError, match=message):
        parse_profiles(damaged)


def test_another_schema_is_refused(document):
    with pytest.raises(ValueError, match="schema_version"):
        parse_profiles({**document, "schema_version": 99})


def test_refitting_reproduces_the_packaged_file(document, data):
    """Same seed, same tables: every number of every profile again, to the five digits that are kept."""
    pytest.importorskip("pandas")
    pytest.importorskip("scipy")
    from calibration.fit_coefficients import fit_all

    again = json.loads(json.dumps(fit_all(data)))
    for name, entry in document["profiles"].items():
        for key in ("compute_efficiency", "memory_efficiency", "decode_attention_efficiency", "prefill_attention_efficiency"):
            assert again["profiles"][name][key] == pytest.approx(entry[key], rel=2e-3), (name, key)
        assert again["profiles"][name]["gemm_residual"] == pytest.approx(entry["gemm_residual"], rel=5e-3)
        assert again["profiles"][name]["all_reduce_alpha_s"] == pytest.approx(entry["all_reduce_alpha_s"], rel=1e-2)


@pytest.mark.parametrize(("tokens", "rel"), [(1, 0.05), (512, 0.12), (4096, 0.06)])
def test_llama_70b_layer_on_a100_against_vidur_rows_read_here(data, tokens, rel):
    """Sum of the four GEMM medians of Vidur's Llama-2-70B rows, worked out from the CSV without calibration code."""
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(data / "vidur/compute/a100/meta-llama/Llama-2-70b-hf/mlp.csv.gz")
    rows = table[(table["num_tokens"] - tokens).abs() <= max(tokens // 32, 0)]
    ops = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    found = profile("a100")
    for _, row in rows.iterrows():
        tp = row["num_tensor_parallel_workers"]
        measured_s = sum(row[f"time_stats.{op}.median"] for op in ops) * 1e-3
        numbers = 8192 * 128 * 2 * (64 / tp + max(8 / tp, 1)) + 3 * 8192 * 28672 / tp
        roof_s = max(
            2 * numbers * row["num_tokens"] / (312e12 * found.compute_efficiency),
            2 * numbers / (2039e9 * found.memory_efficiency),
        )
        predicted_s = float(residual_at(found.gemm_residual, row["num_tokens"])) * roof_s + 4 * found.gemm_overhead_s
        if tp <= 4:
            assert predicted_s == pytest.approx(measured_s, rel=rel), (tokens, tp)
    assert len(rows) >= 1


def test_message_sizes_of_the_two_sources_agree_once_elements_are_bytes(data):
    """aiconfigurator counts 2-byte elements, Vidur bytes: at 32 MiB on 4 H100s both give bandwidth within a factor 1.5."""
    pytest.importorskip("pandas")
    from calibration.measurements import aiconfigurator_all_reduce, vidur_all_reduce

    rates = []
    for rows in (aiconfigurator_all_reduce(data, "h100_sxm", 4, "graph"), vidur_all_reduce(data, "h100_dgx", 4, 4)):
        near = np.abs(rows.work - 32 * 2**20) < 2**20
        assert near.any()
        rates.append(float(np.median(rows.work[near] / rows.measured_s[near])))
    assert 1 / 1.5 < rates[0] / rates[1] < 1.5, rates
