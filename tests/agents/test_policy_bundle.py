"""The bundle: what it computes, what it refuses, and that loading runs nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from policies_under_test import CANDIDATES_MAX, CONTEXT, FEATURES, SCHEMA, contents, recorded_observations
from safetensors.numpy import load as parse_safetensors
from safetensors.numpy import save as dump_safetensors

from agents.policy_bundle import (
    DESCRIPTION_BYTES_MAX,
    DESCRIPTION_FILE,
    WEIGHTS_FILE,
    BundleError,
    EmptyMask,
    NonFiniteScores,
    TooManyCandidates,
    load_bundle,
    write_bundle,
)


@pytest.fixture()
def bundle_dir(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle", contents())


def plain_score(bundle, candidates, context, mask) -> list[float]:
    """The network's formula in scalar Python: an oracle that shares no line with the implementation."""
    from math import tanh

    weights, scaling = bundle.contents.weights, bundle.contents.scaling
    clip = lambda x: max(-scaling.clip, min(scaling.clip, x))  # noqa: E731
    rows = [[clip((x - m) / s) for x, m, s in zip(row, scaling.candidate_mean, scaling.candidate_scale, strict=True)] for row in candidates]
    ctx = [clip((x - m) / s) for x, m, s in zip(context, scaling.context_mean, scaling.context_scale, strict=True)]

    def linear(name, vector):
        return [sum(w * x for w, x in zip(line, vector, strict=True)) for line in weights[f"{name}.weight"].tolist()]

    def add(*vectors):
        return [sum(parts) for parts in zip(*vectors, strict=True)]

    embed_bias, first_bias = weights["embed_candidate.bias"].tolist(), weights["first_candidate.bias"].tolist()
    embedded = [
        [tanh(x) for x in add(linear("embed_candidate", row), embed_bias, linear("embed_context", ctx))]
        for row, allowed in zip(rows, mask, strict=True)
        if allowed
    ]
    pool = [sum(column) / len(embedded) for column in zip(*embedded, strict=True)] + [max(column) for column in zip(*embedded, strict=True)]
    state = add(linear("first_context", ctx), linear("first_pool", pool))
    scores = []
    for row in rows:
        first = [tanh(x) for x in add(linear("first_candidate", row), first_bias, state)]
        second = [tanh(x) for x in add(linear("second", first), weights["second.bias"].tolist())]
        scores.append(linear("out", second)[0] + float(weights["out.bias"][0]) + linear("residual", row)[0])
    return scores


def test_scores_match_the_formula_in_plain_python(bundle_dir):
    """Float32 against double over sums of up to 64 terms: 1e-5."""
    bundle = load_bundle(bundle_dir)
    for observation in recorded_observations(5):
        parts = observation["candidates"], observation["context"], observation["mask"]
        assert bundle.scores(*parts) == pytest.approx(plain_score(bundle, *(part.tolist() for part in parts)), abs=1e-5)


def test_padding_and_order_change_nothing(bundle_dir):
    bundle = load_bundle(bundle_dir)
    rng = np.random.default_rng(2)
    for observation in recorded_observations(50):
        real = int(observation["mask"].sum())
        candidates, context, mask = observation["candidates"], observation["context"], observation["mask"]
        short = bundle.scores(candidates[:real], context, mask[:real])
        assert bundle.scores(candidates, context, mask)[:real] == pytest.approx(short, abs=2e-6)
        order = rng.permutation(real)
        assert bundle.scores(candidates[order], context, mask[order]) == pytest.approx(short[order], abs=2e-6)


def test_choose_is_the_best_allowed_lowest_index_on_a_tie(bundle_dir):
    bundle = load_bundle(bundle_dir)
    candidates, context = np.zeros((4, FEATURES), np.float32), np.zeros(CONTEXT, np.float32)
    assert bundle.choose(candidates, context, np.array([0, 1, 1, 1])) == 1
    for observation in recorded_observations(50):
        parts = observation["candidates"], observation["context"], observation["mask"]
        scores = np.where(observation["mask"] > 0.5, bundle.scores(*parts), -np.inf)
        assert bundle.choose(*parts) == scores.argmax()


@pytest.mark.fault("K02")
def test_empty_mask_and_bad_numbers_go_to_the_heuristic(bundle_dir):
    bundle = load_bundle(bundle_dir)
    candidates, context = np.zeros((4, FEATURES), np.float32), np.zeros(CONTEXT, np.float32)
    with pytest.raises(EmptyMask):
        bundle.choose(candidates, context, np.zeros(4))
    candidates[2, 3] = np.nan
    with pytest.raises(NonFiniteScores):
        bundle.choose(candidates, context, np.ones(4))
    with pytest.raises(TooManyCandidates, match=f"{CANDIDATES_MAX + 1} candidates"):
        bundle.choose(np.zeros((CANDIDATES_MAX + 1, FEATURES)), context, np.ones(CANDIDATES_MAX + 1))
    with pytest.raises(ValueError, match=r"expected \(C, 12\), \(7,\), \(C,\)"):
        bundle.scores(np.zeros((4, FEATURES - 1)), context, np.ones(4))


def test_training_range_names_what_is_outside(bundle_dir):
    bundle = load_bundle(bundle_dir)
    low, high = bundle.contents.scaling.candidate_low, bundle.contents.scaling.candidate_high
    middle = ((low + high) / 2)[None].repeat(3, axis=0)
    context = (bundle.contents.scaling.context_low + bundle.contents.scaling.context_high) / 2
    assert bundle.in_training_range(middle, context, np.ones(3))
    # Slack is a tenth of the width on each side.
    middle[1, 4] = high[4] + 0.09 * (high[4] - low[4])
    assert bundle.in_training_range(middle, context, np.ones(3))
    middle[1, 4] = high[4] + 0.11 * (high[4] - low[4])
    assert bundle.out_of_range(middle, context, np.ones(3)) == ("feature_4",)
    assert bundle.in_training_range(middle, context, np.array([1, 0, 1]))
    context[2] = np.nan
    assert bundle.out_of_range(middle, context, np.array([1, 0, 1])) == ("context_2",)


def test_written_bundle_loads_with_equal_contents(bundle_dir):
    original, loaded = contents(), load_bundle(bundle_dir, expected=SCHEMA)
    assert loaded.schema == original.schema
    assert loaded.evaluation == {"goodput_fraction": 0.9} and loaded.provenance == {"commit": "abc"}
    for name, array in original.weights.items():
        assert np.array_equal(loaded.contents.weights[name], array)
    for name in original.scaling.ARRAYS:
        assert np.array_equal(getattr(loaded.contents.scaling, name), getattr(original.scaling, name))


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    broken = dict(contents().weights)
    broken["out.bias"] = np.array([np.inf], np.float32)
    with pytest.raises(BundleError, match=r"out\.bias holds a number that is not finite"):
        write_bundle(tmp_path / "bad", dataclasses.replace(contents(), weights=broken))

    def no_rename(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "rename", no_rename)
    with pytest.raises(OSError, match="disk full"):
        write_bundle(tmp_path / "bad", contents())
    assert list(tmp_path.iterdir()) == []


def test_existing_bundle_is_not_overwritten(bundle_dir):
    with pytest.raises(FileExistsError):
        write_bundle(bundle_dir, contents())


def _edit(bundle_dir: Path, change) -> None:
    path = bundle_dir / DESCRIPTION_FILE
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))


def _edit_weights(bundle_dir: Path, change) -> None:
    """Change the weights and the recorded digest with them, so that the check meant here is the one reached."""
    import hashlib

    arrays = dict(parse_safetensors((bundle_dir / WEIGHTS_FILE).read_bytes()))
    change(arrays)
    data = dump_safetensors(arrays)
    (bundle_dir / WEIGHTS_FILE).write_bytes(data)
    _edit(bundle_dir, lambda d: d.update(weights_sha256=hashlib.sha256(data).hexdigest()))


REFUSALS = {
    "no scaling": (lambda d: _edit(d, lambda x: x.pop("scaling")), "field scaling"),
    "scaling too short": (lambda d: _edit(d, lambda x: x["scaling"]["candidate_mean"].pop()), "12 finite numbers"),
    "scale zero": (lambda d: _edit(d, lambda x: x["scaling"]["context_scale"].__setitem__(0, 0.0)), "not positive"),
    "renamed feature": (lambda d: _edit(d, lambda x: x["feature_names"].__setitem__(0, "other")), "schema_sha256"),
    "swapped features": (lambda d: _edit(d, lambda x: x["feature_names"].reverse()), "schema_sha256"),
    "other version": (lambda d: _edit(d, lambda x: x.update(observation_version=4)), "schema_sha256"),
    "version a truth value": (
        lambda d: _edit(d, lambda x: x.update(observation_version=True)),
        "observation_version must be int",
    ),
    "future format": (lambda d: _edit(d, lambda x: x.update(format_version=2)), "format_version=2"),
    "huge network": (lambda d: _edit(d, lambda x: x["network"].update(hidden=10**9)), "hidden"),
    "wrong width": (lambda d: _edit(d, lambda x: x["network"].update(hidden=16)), "expected float32"),
    "code as activation": (lambda d: _edit(d, lambda x: x["network"].update(activation="__import__('os')")), "unknown; known"),
    "not an object": (lambda d: (d / DESCRIPTION_FILE).write_text("[1]"), "must hold an object"),
    "NaN in JSON": (lambda d: (d / DESCRIPTION_FILE).write_text('{"a": NaN}'), "not JSON"),
    "deep nesting": (lambda d: (d / DESCRIPTION_FILE).write_text("[" * 100_000), "RecursionError"),
    "not text": (lambda d: (d / DESCRIPTION_FILE).write_bytes(b"\xff\xfe\x00"), "not a readable bundle"),
    "description too large": (lambda d: (d / DESCRIPTION_FILE).write_bytes(b" " * (DESCRIPTION_BYTES_MAX + 1)), "larger than"),
    "weights missing": (lambda d: (d / WEIGHTS_FILE).unlink(), "is missing"),
    "weights cut": (lambda d: (d / WEIGHTS_FILE).write_bytes((d / WEIGHTS_FILE).read_bytes()[:-8]), "SHA-256 differs"),
    "weight not finite": (lambda d: _edit_weights(d, lambda w: w["second.bias"].__setitem__(0, np.nan)), "not finite"),
    "weight too many": (lambda d: _edit_weights(d, lambda w: w.update(extra=np.zeros(1, np.float32))), "unknown ..extra"),
    "weight missing": (lambda d: _edit_weights(d, lambda w: w.pop("residual.weight")), "missing ..residual.weight"),
    "weight of another type": (lambda d: _edit_weights(d, lambda w: w.update({"out.bias": np.zeros(1)})), "float64"),
}


def test_a_run_or_its_bundle_folder_is_answered_with_the_bundles_inside(bundle_dir, tmp_path):
    """`--bundle runs/x/bundle` for `runs/x/bundle/route` is the likeliest slip: the refusal names what was meant."""
    run = tmp_path / "run"
    for kind in ("route", "split"):
        shutil.copytree(bundle_dir, run / "bundle" / kind)
    for given in (run, run / "bundle"):
        with pytest.raises(BundleError, match=f"give {run}/bundle/route or {run}/bundle/split$"):
            load_bundle(given)
    with pytest.raises(BundleError, match=r"no such directory$"):
        load_bundle(run / "elsewhere")


@pytest.mark.fault("K03")
@pytest.mark.parametrize("case", REFUSALS)
def test_damaged_bundle_is_refused_in_one_line(bundle_dir, case):
    damage, message = REFUSALS[case]
    damage(bundle_dir)
    with pytest.raises(BundleError, match=message) as caught:
        load_bundle(bundle_dir)
    assert "\n" not in str(caught.value)


def test_other_schema_than_expected_is_refused(bundle_dir):
    with pytest.raises(BundleError, match="observation_version is 907; this program uses 4"):
        load_bundle(bundle_dir, dataclasses.replace(SCHEMA, observation_version=4))
    swapped = ("feature_1", "feature_0", *SCHEMA.feature_names[2:])
    with pytest.raises(BundleError, match="feature_names differ from this program's at position 0"):
        load_bundle(bundle_dir, dataclasses.replace(SCHEMA, feature_names=swapped))


@pytest.mark.fault("K08")
def test_loading_look_alikes_runs_nothing(tmp_path, shared):
    """Each of the marker files alone, and dressed up as each file of a bundle: refused within a second, no marker."""
    marker, out = tmp_path / "MARKER", tmp_path / "look_alikes"
    script = shared / "cases" / "inputs" / "make_marker_policy.py"
    subprocess.run([sys.executable, str(script), str(out), str(marker)], check=True, capture_output=True)
    files = sorted(out.iterdir())
    assert len(files) == 3
    paths = [*files, out]
    for index, file in enumerate(files):
        for name in (DESCRIPTION_FILE, WEIGHTS_FILE):
            dressed = write_bundle(tmp_path / f"dressed_{index}_{name}", contents())
            (dressed / name).write_bytes(file.read_bytes())
            paths.append(dressed)
    for path in paths:
        started_s = time.process_time()
        with pytest.raises(BundleError) as caught:
            load_bundle(path)
        assert time.process_time() - started_s < 1.0
        assert "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.fault("K08")
def test_importing_and_loading_needs_no_training_library(bundle_dir):
    code = (
        "import sys; from agents.policy_bundle import load_bundle; load_bundle(sys.argv[1]);"
        "print([m for m in ('torch', 'stable_baselines3', 'gymnasium', 'simpy', 'pandas', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(bundle_dir)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_twenty_candidates_take_under_200_microseconds(bundle_dir):
    """Median of 500 decisions; the machine is shared, so the best of three medians counts."""
    bundle = load_bundle(bundle_dir)
    observation = recorded_observations(1)[0]
    parts = observation["candidates"][:20], observation["context"], np.ones(20, np.float32)
    medians_s = []
    for _ in range(3):
        times_s = []
        for _ in range(500):
            started_s = time.perf_counter()
            bundle.choose(*parts)
            times_s.append(time.perf_counter() - started_s)
        medians_s.append(float(np.median(times_s)))
    assert min(medians_s) < 200e-6
