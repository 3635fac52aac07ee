"""The replay gate takes a signed evaluation of this very bundle that beats the incumbent with confidence, and nothing else."""

from __future__ import annotations

import json

import pytest

from agents.evaluate import main as evaluate
from runtime.rollout.command_line import _lines
from runtime.rollout.evidence import read_key, replay_verdict
from runtime.rollout.settings import ReplayGate
from runtime.rollout.state import RolloutError
from tests.runtime.rollout.rollout_parts import KEY, bundle, evaluation

GATE = ReplayGate()


def test_a_better_bundle_passes(tmp_path):
    made = bundle(tmp_path / "made")
    said = replay_verdict(GATE, made, evaluation(tmp_path / "e.json", made, key=KEY), "net_utility", key=KEY)
    assert said["is_signed"] and said["worlds"] == 24
    assert said["low"] < said["gain"] < said["high"] and said["gain"] == pytest.approx(0.05, abs=0.01) and said["low"] > 0.04


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gain": 0.001}, "must be above 0"),
        ({"gain": -0.05}, "must be above 0"),
        ({"worlds": 12}, "worlds_min is 20"),
        ({"is_shortened": True}, "allow_shortened"),
        ({"key": b"another key of the author"}, "signed with another key"),
        ({"key": None}, "not signed"),
        ({"policies": {"net_utility": [{"goodput": 1.0}]}}, "no results of ppo_route"),
        ({"policies": {"ppo_route": [{"goodput": 1.0}]}}, "no results of net_utility"),
    ],
)
def test_what_is_not_good_enough(tmp_path, changes, said):
    made = bundle(tmp_path / "made")
    path = evaluation(tmp_path / "e.json", made, **({"key": KEY} | changes))
    with pytest.raises(RolloutError, match=said):
        replay_verdict(GATE, made, path, "net_utility", key=KEY)


def test_it_must_be_of_this_bundle_and_unchanged(tmp_path):
    made, other = bundle(tmp_path / "made"), bundle(tmp_path / "other", 1)
    path = evaluation(tmp_path / "e.json", made)
    with pytest.raises(RolloutError, match="not of the bundle"):
        replay_verdict(GATE, other, path, "net_utility")
    content = json.loads(path.read_text())
    content["results"]["policies"]["ppo_route"][0]["goodput"] = 0.99
    path.write_text(json.dumps(content))
    with pytest.raises(RolloutError, match="was changed"):
        replay_verdict(GATE, made, path, "net_utility")
    with pytest.raises(RolloutError, match="not an evaluation file"):
        replay_verdict(GATE, made, tmp_path / "nowhere.json", "net_utility")


def test_against_a_bundle(tmp_path):
    """The incumbent bundle's own evaluation on the same worlds is needed; its row is what must be beaten."""
    made, incumbent = bundle(tmp_path / "made"), bundle(tmp_path / "incumbent", 1)
    path = evaluation(tmp_path / "e.json", made, gain=0.05)
    with pytest.raises(RolloutError, match="--incumbent-evaluation"):
        replay_verdict(GATE, made, path, incumbent)
    weaker = evaluation(tmp_path / "weaker.json", incumbent, gain=0.02)
    assert replay_verdict(GATE, made, path, incumbent, weaker)["gain"] == pytest.approx(0.03)
    stronger = evaluation(tmp_path / "stronger.json", incumbent, gain=0.07)
    with pytest.raises(RolloutError, match="must be above 0"):
        replay_verdict(GATE, made, path, incumbent, stronger)
    elsewhere = evaluation(tmp_path / "elsewhere.json", incumbent, gain=0.0, world_names=[f"v{i}" for i in range(24)])
    with pytest.raises(RolloutError, match="world_names differ"):
        replay_verdict(GATE, made, path, incumbent, elsewhere)


def test_a_file_that_agents_evaluate_made(tmp_path):
    """Two small worlds, a policy of random weights, signed: the file is understood as it is; the gate is strict about both."""
    made = bundle(tmp_path / "made")
    experiment, key = tmp_path / "tiny.yaml", tmp_path / "key"
    experiment.write_text(
        "name: tiny\nworlds: {clusters: [unlike-3], requests: 30, limit_multiplier: 2}\ncompare: {validation_worlds: 1, test_worlds: 2}\n"
    )
    key.write_bytes(KEY)
    path = tmp_path / "e.json"
    arguments = ["--experiment", str(experiment), "--bundle", f"route={made}", "--heuristic", "route=net_utility", "--load-one", "1.5"]
    assert evaluate([*arguments, "--processes", "1", "--output", str(path), "--key-file", str(key)]) == 0
    loose = ReplayGate(worlds_min=2, gain_min=-1.0, allow_shortened=True)
    said = replay_verdict(loose, made, path, "net_utility", key=read_key(str(key)))
    results = json.loads(path.read_text())["results"]["policies"]
    gains = [ours["goodput"] - theirs["goodput"] for ours, theirs in zip(results["ppo_route"], results["net_utility"], strict=True)]
    assert said["gain"] == pytest.approx(sum(gains) / 2) and said["experiment"] == "tiny" and said["worlds"] == 2
    with pytest.raises(RolloutError, match="worlds_min is 20"):
        replay_verdict(ReplayGate(allow_shortened=True), made, path, "net_utility", key=KEY)


def test_a_folder_of_bundles_is_answered_with_what_was_meant(tmp_path):
    made = bundle(tmp_path / "run" / "bundle" / "route")
    with pytest.raises(RolloutError, match=f"give {made}$"):
        replay_verdict(GATE, made.parent, evaluation(tmp_path / "e.json", made, key=KEY), "net_utility", key=KEY)


def test_a_stage_that_does_not_move_says_what_it_waits_for():
    """With a service the candidate's process is on its way; without one nothing is."""
    said = {"title": "shadow", "stage": "shadow", "incumbent": {"kind": "heuristic", "name": "net_utility"}, "is_running": False}
    assert "process is starting" in _lines(said | {"is_served": True}, "start")[-1]
    assert "a service must run" in _lines(said | {"is_served": False}, "start")[-1]
