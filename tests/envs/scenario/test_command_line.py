"""`python -m envs.scenario`: tables on stdout, one line on stderr and exit code 2 for bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from envs.scenario.__main__ import main
from envs.scenario.tables import table

PROJECT = Path(__file__).resolve().parents[3]


def test_list_names_every_ready_cluster(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["cluster", "groups", "parked", "GPUs"]
    assert [line.split()[:4] for line in lines if line.startswith("racks-64")] == [["racks-64", "19", "3", "64"]]


@pytest.mark.parametrize(("what", "row"), [("gpus", "RTX4090"), ("models", "Qwen3-30B-A3B"), ("links", "ethernet-25g")])
def test_catalogues_are_listed(capsys, what, row):
    assert main(["list", what]) == 0
    assert any(line.startswith(row) for line in capsys.readouterr().out.splitlines())


def test_show_gives_the_numbers_of_each_group(capsys):
    """Two RTX cards of 24 GiB: 48 GiB, 71 + 165.2 = 236 TFLOP/s, 936 + 1008 = 1944 GB/s; 8.03e9 int4 weights are 4.01 GB."""
    assert main(["show", "consumer-2"]) == 0
    shown = capsys.readouterr().out
    assert "weights int4 4.01 GB" in shown
    row = next(line for line in shown.splitlines() if line.startswith("pair"))
    assert "1xRTX3090 + 1xRTX4090" in row
    assert row.split()[-5:] == ["48", "42.4", "236", "1944", "on"]  # 42.4 = 0.9 x 48 GiB - 4.01 GB


def test_the_printed_file_is_a_cluster_file_again(capsys, tmp_path):
    assert main(["show", "mixed-8", "--yaml"]) == 0
    path = tmp_path / "copy.yaml"
    path.write_text(capsys.readouterr().out)
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out == "ok: mixed-8: 8 group(s), 0 of them parked, 11 GPU(s), model Llama-3.1-8B\n"


def test_scripted_faults_are_shown(capsys, tmp_path):
    content = yaml.safe_load((PROJECT / "envs/scenario/clusters/consumer-2.yaml").read_text())
    content["faults"] = [{"kind": "slow_link", "group": "pair", "start_s": 10, "length_s": 30, "size": 2.5}]
    path = tmp_path / "faulty.yaml"
    path.write_text(yaml.safe_dump(content))
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["slow_link", "pair", "all", "10", "30", "2.5"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "none.yaml"], "none.yaml: no such file"),
        (["show", "mixed8"], 'did you mean "mixed-8"'),
        (["lst"], "invalid choice: 'lst'"),
        (["list", "gpu"], "invalid choice: 'gpu'"),
        ([], "required: command"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said):
    done = subprocess.run(
        [sys.executable, "-m", "envs.scenario", *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_table_aligns_columns():
    assert table(("a", "long"), [("xyz", "1"), ("", "22")]) == "a    long\n---  ----\nxyz  1\n     22"
