"""The replay gate takes a signed evaluation of this very bundle that beats the incumbent with confidence, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from agents.evaluate import main as evaluate
from agents.policy_bundle import bundle_digests
from runtime.rollout.command_line import _lines
from runtime.rollout.evidence import BadEvaluation, read_key, replay_verdict
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


@pytest.mark.parametrize("target", ["/dev/zero", "/proc/self/mem", "/", "a\0b", "pipe"])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path, target):
    """An operator's order names files: neither memory nor a thread is spent on a device or a pipe."""
    made = bundle(tmp_path / "made")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RolloutError, match="not an evaluation file"):
        replay_verdict(GATE, made, tmp_path / target, "net_utility")
    with pytest.raises(RolloutError, match="not a bundle"):
        replay_verdict(GATE, tmp_path / target, evaluation(tmp_path / "e.json", made), "net_utility")


@pytest.mark.parametrize(
    "wrong",
    [
        {"results": 1}, {"results": []}, {"results": {"policies": 3}}, {"results": {"policies": {"ppo_route": 5}}},
        {"bundles": []}, {"bundles": {"route": 1}},
    ],
)  # fmt: skip
def test_a_file_of_another_shape_is_refused(tmp_path, wrong):
    """With a right digest, but not what `agents.evaluate` writes."""
    made = bundle(tmp_path / "made")
    parts = {"results": {"policies": {}}, "bundles": {"route": bundle_digests(made)}} | wrong
    content = {"format_version": 1, "experiment": "x", "comparisons": [], **parts}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (tmp_path / "e.json").write_text(json.dumps(content | {"sha256": digest, "hmac_sha256": None}))
    with pytest.raises(RolloutError):
        replay_verdict(GATE, made, tmp_path / "e.json", "net_utility")


@pytest.mark.parametrize(
    "world, shown", [({"goodput": None}, "None"), ({"goodput": "0.9"}, "'0.9'"), ({"goodput": True}, "True"), ({}, "None"), (3, "None")]
)
def test_a_goodput_that_is_no_number_is_named_with_its_place(tmp_path, world, shown):
    path = evaluation(tmp_path / "e.json", bundle(tmp_path / "made"), policies={"net_utility": [{"goodput": 0.5}, world]})
    with pytest.raises(BadEvaluation) as told:
        replay_verdict(GATE, tmp_path / "made", path, "net_utility")
    assert str(told.value).startswith(f"e.json: results.policies.net_utility[1].goodput: {shown} is no finite number; ")


def test_a_file_nested_without_end_is_refused(tmp_path):
    (tmp_path / "e.json").write_text("[" * 200_000)
    with pytest.raises(RolloutError, match="not an evaluation file"):
        replay_verdict(GATE, bundle(tmp_path / "made"), tmp_path / "e.json", "net_utility")


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
