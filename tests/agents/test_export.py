"""Export: same decisions before and after, nothing written when they differ, scaling travels and stands still."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from policies_under_test import SCHEMA, fitted_policy, recorded_observations

import agents.export
from agents.export import ParityError, bundle_contents, check_parity, collect_provenance, export_bundle, export_onnx
from agents.policy_bundle import BundleError, BundlePolicy, load_bundle


@pytest.mark.fault("K07")
@pytest.mark.parametrize(("activation", "observations"), [("tanh", 10_000), ("relu", 1500)])
def test_ten_thousand_observations_decide_alike(tmp_path, activation, observations):
    policy = fitted_policy(activation=activation)
    report = export_bundle(policy, tmp_path / "bundle", SCHEMA, recorded=recorded_observations(1000), observations=observations)
    assert agents.export.PARITY_OBSERVATIONS == 10_000
    assert report.observations == observations and report.decisions_different == 0
    assert report.score_difference_max <= 1e-4
    assert report.at_tie_edge < 10
    assert load_bundle(tmp_path / "bundle", SCHEMA).schema == SCHEMA


FAULTS = {
    "scaling skipped": lambda c: dataclasses.replace(
        c, scaling=dataclasses.replace(c.scaling, candidate_scale=np.ones_like(c.scaling.candidate_scale))
    ),
    "clip skipped": lambda c: dataclasses.replace(c, scaling=dataclasses.replace(c.scaling, clip=1e6)),
    "other activation": lambda c: dataclasses.replace(c, network=dataclasses.replace(c.network, activation="relu")),
    "wrong layer": lambda c: dataclasses.replace(c, weights={**c.weights, "second.weight": c.weights["second.weight"].T.copy()}),
    "features shifted": lambda c: dataclasses.replace(
        c, weights={**c.weights, "first_candidate.weight": np.roll(c.weights["first_candidate.weight"], 1, axis=1)}
    ),
}


@pytest.mark.fault("K07")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_export_writes_nothing(tmp_path, monkeypatch, fault):
    genuine = agents.export.bundle_contents
    monkeypatch.setattr(agents.export, "bundle_contents", lambda *parts: FAULTS[fault](genuine(*parts)))
    with pytest.raises(ParityError, match="nothing was written"):
        export_bundle(fitted_policy(), tmp_path / "bundle", SCHEMA)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("K03")
def test_policy_without_scaling_is_not_exported(tmp_path):
    with pytest.raises(BundleError, match="never fitted"):
        export_bundle(fitted_policy(fitted=False), tmp_path / "bundle", SCHEMA)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("K03")
def test_scores_agree_in_a_new_process_and_scaling_stands_still(tmp_path):
    """1,000 recorded observations within 1e-5 in a process that never saw the trainer; then 10,000 decisions there."""
    policy, observations = fitted_policy(), recorded_observations(1000)
    export_bundle(policy, tmp_path / "bundle", SCHEMA, observations=500)
    stacked = {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}
    np.savez(tmp_path / "observations.npz", **stacked)
    code = (
        "import sys, numpy as np; from agents.policy_bundle import load_bundle\n"
        "o = np.load(sys.argv[2]); b = load_bundle(sys.argv[1]); rows = list(zip(o['candidates'], o['context'], o['mask']))\n"
        "before = [getattr(b.contents.scaling, n).copy() for n in b.contents.scaling.ARRAYS]\n"
        "np.save(sys.argv[3], np.stack([b.scores(*r) for r in rows]))\n"
        "[b.choose(*r) for _ in range(10) for r in rows]\n"
        "assert all(np.array_equal(x, getattr(b.contents.scaling, n)) for x, n in zip(before, b.contents.scaling.ARRAYS))\n"
    )
    arguments = [str(tmp_path / name) for name in ("bundle", "observations.npz", "scores.npy")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, timeout=60)
    with torch.no_grad():
        expected = policy.scores({key: torch.from_numpy(value) for key, value in stacked.items()}).numpy()
    allowed = stacked["mask"] > 0.5
    assert np.abs(np.load(tmp_path / "scores.npy") - expected)[allowed].max() < 1e-5


@pytest.mark.fault("K02")
def test_exported_policy_never_picks_a_forbidden_candidate():
    policy = fitted_policy()
    bundle = BundlePolicy(bundle_contents(policy, SCHEMA, {}, {}))
    rng = np.random.default_rng(0)
    for _ in range(20_000):
        observation = agents.export.random_observation(policy, bundle, rng)
        assert observation["mask"][bundle.choose(observation["candidates"], observation["context"], observation["mask"])] == 1.0


def test_parity_is_checked_on_the_recorded_observations_too():
    policy = fitted_policy()
    bundle = BundlePolicy(bundle_contents(policy, SCHEMA, {}, {}))
    bad = recorded_observations(3)
    bad[1]["candidates"][0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        check_parity(policy, bundle, np.random.default_rng(0), 100, bad)


def test_schema_of_other_sizes_is_refused(tmp_path):
    with pytest.raises(BundleError, match="the schema names"):
        export_bundle(fitted_policy(), tmp_path / "b", dataclasses.replace(SCHEMA, candidates_max=25))


def test_provenance_is_strict_json(tmp_path):
    provenance = collect_provenance({"gamma_per_s": 0.9, "path": tmp_path}, [1, np.int64(2)], tmp_path)
    assert json.loads(json.dumps(provenance, allow_nan=False))["seeds"] == [1, 2]
    assert provenance["commit"] == "unknown"
    assert provenance["packages"]["numpy"] == np.__version__
    assert collect_provenance({"gamma_per_s": 0.8}, [1], tmp_path)["config_sha256"] != provenance["config_sha256"]


def test_onnx_is_skipped_with_a_word_or_agrees(tmp_path):
    policy = fitted_policy()
    said = export_onnx(policy, tmp_path / "policy.onnx")
    if importlib.util.find_spec("onnx") is None:
        assert "skipped" in said and not (tmp_path / "policy.onnx").exists()
        return
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(tmp_path / "policy.onnx"))
    stacked = {key: np.stack([o[key] for o in recorded_observations(50)]) for key in ("candidates", "context", "mask")}
    with torch.no_grad():
        tensors = {key: torch.from_numpy(value) for key, value in stacked.items()}
        scaled = policy.normaliser(tensors["candidates"], tensors["context"])
        expected = policy.scorer(*scaled, tensors["mask"])
    assert session.run(None, stacked)[0] == pytest.approx(expected.numpy(), abs=1e-4)
