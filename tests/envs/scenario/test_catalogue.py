"""The catalogues: complete, sourced, and in agreement with figures from outside them."""

from __future__ import annotations

import csv

import pytest
import yaml

from envs.domain.units import GIB
from envs.scenario import catalogue
from envs.scenario.scenario_error import ScenarioError

MEASURED_PROFILES = {"a100", "h100", "a40", "l40s", "b200", "rtx4090", "rtxpro6000", "v100", "l4", "t4"}


def test_catalogues_are_large_enough_and_every_row_has_a_source():
    assert len(catalogue.load_gpus()) >= 24
    assert len(catalogue.load_models()) >= 10
    rows = [*catalogue.gpu_entries().values(), *catalogue.model_entries().values(), *catalogue.link_entries().values()]
    assert all(row.source.strip() for row in rows)


def test_every_measured_profile_is_used_and_no_other():
    assert {spec.kernel_profile for spec in catalogue.load_gpus().values()} == MEASURED_PROFILES


def test_every_price_says_where_it_is_from():
    for row in catalogue.gpu_entries().values():
        assert (row.usd_per_hour > 0) == bool(row.price_source), row.name


@pytest.mark.parametrize("name", sorted(catalogue.model_entries()))
def test_shapes_give_the_published_number_of_parameters(name):
    """The published total counts norms and biases too, which ModelSpec leaves out: under 0.1 % of every model here."""
    published = catalogue.model_entries()[name].parameters_billion
    assert published is not None
    assert catalogue.model(name).weight_bytes / 2 / 1e9 == pytest.approx(published, rel=1e-3)


def test_kv_bytes_of_llama_2_70b():
    """2 x 80 layers x 8 KV heads x 128 x 2 bytes = 327,680 bytes a token; half of that in fp8."""
    assert catalogue.model("Llama-2-70B").kv_bytes_per_token == 327_680
    assert catalogue.model("Llama-2-70B", kv_dtype="fp8").kv_bytes_per_token == 163_840


def test_dtypes_change_the_weights_alone_or_the_kv_alone():
    plain, small = catalogue.model("Llama-3.1-8B"), catalogue.model("Llama-3.1-8B", weight_dtype="int4")
    assert small.weight_bytes == pytest.approx(plain.weight_bytes / 4)
    assert small.kv_bytes_per_token == plain.kv_bytes_per_token


def test_links_are_one_direction():
    """NVLink4 is 900 GB/s both ways, PCIe 4.0 x16 about 31.5 one way, Ethernet 10 Gb/s = 1.25 GB/s: none may be beaten."""
    ceilings = {"nvlink2": 150e9, "nvlink4": 450e9, "nvlink5": 900e9, "pcie3": 15.8e9, "pcie4": 31.5e9, "pcie5": 63e9,
                "ethernet-10g": 1.25e9, "ethernet-25g": 3.125e9, "ethernet-100g": 12.5e9, "infiniband-ndr": 50e9}  # fmt: skip
    for name, ceiling in ceilings.items():
        assert 0.5 * ceiling < 1 / catalogue.link(name).beta_s_per_byte < ceiling, name


def test_catalogues_are_read_once_and_cannot_be_written():
    assert catalogue.load_gpus() is catalogue.load_gpus()
    with pytest.raises(TypeError):
        catalogue.load_gpus()["mine"] = catalogue.gpu("L4")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: catalogue.gpu("A100-80G-SXM"), 'GPU "A100-80G-SXM" unknown; did you mean "A100-80G-SXM4"\\? known: A10, '),
        (lambda: catalogue.model("Llama-2-7b"), 'did you mean "Llama-2-7B"'),
        (lambda: catalogue.link("nvlink-4"), 'did you mean "nvlink4"'),
        (lambda: catalogue.model("Llama-2-7B", weight_dtype="int3"), 'dtype "int3" unknown; did you mean "int'),
    ],
)
def test_unknown_names_suggest_the_nearest(call, said):
    with pytest.raises(ScenarioError, match=said):
        call()


SYSTEMS = {
    "A100-80G-SXM4": "a100_sxm", "A100-80G-PCIe": "a100_pcie", "A30": "a30", "H100-SXM5": "h100_sxm", "H100-PCIe": "h100_pcie",
    "H200-SXM": "h200_sxm", "B200-SXM": "b200_sxm", "B300-SXM": "b300_sxm", "GB200": "gb200", "L40S": "l40s", "L4": "l4",
    "RTXPRO6000-Server": "rtx_pro_6000_server", "B60": "b60",
}  # fmt: skip


def test_rows_marked_checked_agree_with_a_second_file(shared):
    """Every GPU marked `checked` has a systems file of ai-dynamo/aiconfigurator that says the same within 0.5 %."""
    checked = {name for name, row in catalogue.gpu_entries().items() if row.checked}
    assert checked == set(SYSTEMS)
    for name, file in SYSTEMS.items():
        stated = yaml.safe_load((shared / f"calibration/aiconfigurator/systems/{file}.yaml").read_text())["gpu"]
        spec = catalogue.gpu(name)
        assert spec.flop_per_s == pytest.approx(stated["bfloat16_tc_flops"], rel=5e-3), name
        assert spec.memory_bytes == pytest.approx(stated["mem_capacity"], rel=5e-3), name
        assert spec.memory_bytes_per_s == pytest.approx(stated["mem_bw"], rel=5e-3), name
        assert spec.tdp_w == stated["power"], name


def test_rows_agree_with_the_datasheet_table(shared):
    """All 25 GPUs of the table are here. A10G differs on purpose (fp32-accumulate rate), memory of L40S and RTX PRO 6000 too."""
    with (shared / "calibration/gpu_specs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 25
    for row in rows:
        spec = catalogue.gpu(row["gpu"])
        if row["gpu"] != "A10G":
            assert spec.flop_per_s / 1e12 == pytest.approx(float(row["fp16_dense_tflops"]), rel=5e-3)
        assert spec.memory_bytes_per_s / 1e9 == pytest.approx(float(row["mem_gbs"]))
        assert spec.memory_bytes / GIB == pytest.approx(float(row["mem_gb"]), rel=0.07)
        assert spec.has_bf16 == (row["bf16_native"] == "1")
        assert spec.usd_per_hour == float(row["usd_per_gpu_hour"] or 0)
