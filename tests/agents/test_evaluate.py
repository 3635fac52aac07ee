"""`python -m agents.evaluate`: the evaluation file holds what it claims, and bad input is one line before any work."""

from __future__ import annotations

import json

import numpy as np
import pytest
from policies_under_test import contents

from agents.evaluate import main, pairs_of
from agents.evaluation import FALLBACKS
from agents.evaluation_file import EvaluationFile, EvaluationFileError, bundle_digests, read_evaluation_file
from agents.policy_bundle import write_bundle
from agents.report import EvaluationResults
from envs.decision.observation import OBSERVATION_VERSION

TINY = """
name: tiny
worlds: {clusters: [unlike-3], requests: 30, limit_multiplier: 2}
compare: {validation_worlds: 1, test_worlds: 2}
"""
KEY = b"0123456789abcdef"


@pytest.fixture
def tiny(tmp_path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


def test_heuristics_alone_are_compared(tiny, tmp_path):
    """Two routers, the fallbacks of split and rebalance, two worlds: the file holds their paired results, signed."""
    output, key_file = tmp_path / "evaluation.json", tmp_path / "key"
    key_file.write_bytes(KEY)
    arguments = ["--experiment", tiny, "--heuristic", "route=round_robin", "--heuristic", "route=least_completion", "--load-one", "1.5"]
    assert main([*arguments, "--processes", "1", "--output", str(output), "--key-file", str(key_file)]) == 0
    found = read_evaluation_file(output, KEY)
    results = EvaluationResults.from_json(json.dumps(found.results))
    assert set(results.policies) == {"round_robin", "least_completion", "split:planner", "rebalance:threshold"}
    assert all(sum(world["counts"].values()) == 30 for worlds in results.policies.values() for world in worlds)
    assert found.experiment == "tiny" and found.bundles == {}
    difference = next(row for row in found.comparisons if row["name"] != results.best_heuristic)
    expected = (results.goodput(difference["name"]) - results.goodput(results.best_heuristic)).mean()
    assert difference["mean"]["estimate"] == pytest.approx(expected)


def test_same_command_same_numbers(tiny, tmp_path):
    def goodput(name: str) -> np.ndarray:
        arguments = ["--experiment", tiny, "--load-one", "2", "--processes", "1", "--worlds", "1", "--output", str(tmp_path / name)]
        assert main(arguments) == 0
        return EvaluationResults.from_json(json.dumps(read_evaluation_file(tmp_path / name).results)).goodput(FALLBACKS["route"])

    assert np.array_equal(goodput("a.json"), goodput("b.json"))


MISTAKES = {
    "no separator": (["--bundle", "route"], "expected KIND=VALUE, e.g. --bundle route=..."),
    "unknown kind": (["--bundle", "rout=x"], 'kind "rout" unknown; did you mean "route"'),
    "no bundle there": (["--bundle", "route=/nowhere"], "is not a bundle directory"),
    "unknown heuristic": (["--heuristic", "route=least_complete"], 'did you mean "least_completion"'),
    "both selections": (["--heuristic", "route=random", "--all-heuristics"], "exclude each other"),
    "no worlds": (["--worlds", "0"], "--worlds 0 must be positive"),
    "load not a number": (["--load-one", "nan"], "--load-one nan must be positive"),
    "negative seed": (["--seed", "-3"], "--seed -3 must be at least 0"),
    "no key": (["--key-file", "/nowhere/key"], "--key-file /nowhere/key: No such file"),
    "unknown experiment": (["--experiment", "smok"], 'did you mean "smoke"'),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_input_is_one_line_and_no_file(mistake, tmp_path, capsys):
    arguments, said = MISTAKES[mistake]
    output = tmp_path / "made" / "evaluation.json"
    experiment = [] if "--experiment" in arguments else ["--experiment", "smoke"]
    assert main([*experiment, *arguments, "--output", str(output)]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("evaluate: ") and err.count("\n") == 1
    assert not output.parent.exists()


def test_bundle_of_another_schema_or_kind_is_refused(tmp_path, capsys):
    bundle = write_bundle(tmp_path / "toy", contents())
    assert main(["--experiment", "smoke", "--bundle", f"route={bundle}"]) == 2
    assert f"observation_version is 907; this program uses {OBSERVATION_VERSION}" in capsys.readouterr().err
    assert main(["--experiment", "smoke", "--bundle", f"split={bundle}"]) == 2
    assert "decision_kind is 'route'; this program uses 'split'" in capsys.readouterr().err


def test_output_is_never_overwritten(tmp_path, capsys):
    output = tmp_path / "evaluation.json"
    output.write_text("kept")
    assert main(["--experiment", "smoke", "--output", str(output)]) == 2
    assert "exists; name a new file" in capsys.readouterr().err and output.read_text() == "kept"


def test_pairs_keep_paths_with_equal_signs():
    assert pairs_of(["route=a=b"], "--bundle", ("route",)) == [("route", "a=b")]


def evaluation(path, key=None) -> EvaluationFile:
    made = EvaluationFile("tiny", {"policies": {}}, ({"name": "a", "mean": 0.25},), {"route": {"bundle.json": "00"}})
    made.write(path, key)
    return made


def test_file_comes_back(tmp_path):
    assert evaluation(tmp_path / "e.json") == read_evaluation_file(tmp_path / "e.json")
    assert evaluation(tmp_path / "s.json", KEY) == read_evaluation_file(tmp_path / "s.json", KEY)


def test_any_change_is_noticed(tmp_path):
    path = tmp_path / "e.json"
    evaluation(path)
    path.write_text(path.read_text().replace("0.25", "0.75"))
    with pytest.raises(EvaluationFileError, match="changed after it was written"):
        read_evaluation_file(path)


def test_digest_alone_is_no_signature(tmp_path):
    """Whoever edits the file can make a new digest, but not a new HMAC."""
    path = tmp_path / "e.json"
    evaluation(path)
    with pytest.raises(EvaluationFileError, match="not signed"):
        read_evaluation_file(path, KEY)
    evaluation(path, b"another key, sixteen or more")
    with pytest.raises(EvaluationFileError, match="signed with another key"):
        read_evaluation_file(path, KEY)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha256": 1, "hmac_sha256": null, "format_version": 1}', "\x00"])
def test_not_an_evaluation_file(tmp_path, text):
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(EvaluationFileError, match="not an evaluation file") as caught:
        read_evaluation_file(path)
    assert "\n" not in str(caught.value)


def test_digests_are_of_the_files(tmp_path):
    """Two bundles with other weights have other digests; the same bundle has the same."""
    first, second = (write_bundle(tmp_path / str(seed), contents(seed)) for seed in (0, 1))
    assert bundle_digests(first) == bundle_digests(first) != bundle_digests(second)
    assert set(bundle_digests(first)) == {"bundle.json", "policy.safetensors"}
