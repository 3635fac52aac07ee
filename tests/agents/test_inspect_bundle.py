"""`python -m agents.inspect_bundle`: shows a bundle, refuses what is none in one line, loads no training library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from policies_under_test import SCHEMA, contents

from agents.inspect_bundle import describe, main
from agents.policy_bundle import write_bundle

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bundle(tmp_path) -> Path:
    return write_bundle(tmp_path / "route", contents())


def test_shows_every_part(bundle, capsys):
    assert main([str(bundle)]) == 0
    text = capsys.readouterr().out
    for part in ("decides", "route", "candidates at most", "24", SCHEMA.digest(), "hidden", "32", "tanh", "goodput_fraction", "0.9", "abc"):
        assert part in text, part
    assert "NOT this program's" in text, "the toy schema is not the encoder's"


def test_ranges_are_the_bundles_own():
    """One line per input that varied, with its lowest and highest value in training."""
    found = contents()
    text = describe(found)
    low, high = found.scaling.candidate_low[3], found.scaling.candidate_high[3]
    line = next(line for line in text.splitlines() if line.split()[:1] == ["feature_3"])
    assert line.split()[1:] == [f"{low:.4g}", "to", f"{high:.4g}"]


def test_inputs_that_never_varied_are_folded():
    found = contents()
    for array, value in ((found.scaling.candidate_low, 0.0), (found.scaling.candidate_high, 0.0)):
        array.setflags(write=True)
        array[[2, 5]] = np.float32(value)
    assert "  always 0: feature_2, feature_5" in describe(found)


def test_parameters_are_counted():
    """F=12, K=7, H=32: 2(12x32+32) + 2(7x32) + 2x32x32 + 32x32+32 ... summed from the shapes of docs/bundle.md."""
    features, context, hidden = 12, 7, 32
    expected = (
        (hidden * features + hidden) + hidden * context + (hidden * features + hidden) + hidden * context
        + hidden * 2 * hidden + (hidden * hidden + hidden) + (hidden + 1) + features
    )  # fmt: skip
    assert f"{expected:,}" in describe(contents())


@pytest.mark.parametrize("damage", ["no folder", "empty folder", "no weights", "cut JSON", "edited JSON"])
def test_bad_bundle_is_one_line_and_code_two(bundle, tmp_path, capsys, damage):
    description = bundle / "bundle.json"
    if damage == "no folder":
        bundle = tmp_path / "nowhere"
    elif damage == "empty folder":
        bundle = tmp_path / "empty"
        bundle.mkdir()
    elif damage == "no weights":
        (bundle / "policy.safetensors").unlink()
    elif damage == "cut JSON":
        description.write_bytes(description.read_bytes()[:-20])
    else:
        description.write_text(description.read_text().replace("feature_0", "feature_x"))
    assert main([str(bundle)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("inspect_bundle: ") and output.err.count("\n") == 1


def test_needs_no_training_library(bundle):
    """The command is for the service's machine, which has numpy and safetensors."""
    code = (
        "import sys; from agents.inspect_bundle import main; code = main([sys.argv[1]]); heavy = set(sys.modules); "
        "heavy &= {'torch', 'gymnasium', 'stable_baselines3', 'simpy', 'pandas'}; sys.exit(code or (str(heavy) if heavy else 0))"
    )
    found = subprocess.run([sys.executable, "-c", code, str(bundle)], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
