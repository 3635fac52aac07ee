"""Cluster files: what a good one becomes, and the one line that each bad one gets."""

from __future__ import annotations

import copy
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.decision.move_candidates import IDLE_MIX
from envs.decision.split_planner import corner_plan
from envs.domain.plans import RankPlace, TpGroup
from envs.domain.units import GB
from envs.perf_model.memory_fit import (
    InfeasibleSplit,
    fits,
    kv_bytes_per_token,
    proportional_plan,
    weight_bytes,
    workspace_bytes,
    workspace_floor_bytes,
)
from envs.scenario import group_check
from envs.scenario.catalogue import gpu, link, load_gpus, model
from envs.scenario.cluster_file import load_cluster, ready_clusters
from envs.scenario.cluster_spec import ClusterLimits, ScriptedFault
from envs.scenario.scenario_error import ScenarioError

GOOD = {
    "name": "mine",
    "model": {"name": "Llama-3.1-8B"},
    "groups": [
        {"name": "pair", "ranks": [{"gpu": "A100-80G-SXM4", "node": "n0"}, {"gpu": "L40S", "node": "n0"}], "inner_link": "pcie4"},
        {"name": "solo", "count": 2, "ranks": [{"gpu": "L4", "node": "n1"}], "parked": True},
    ],
}


def changed(**paths):
    """GOOD with values set at dotted paths: changed(**{"groups.0.name": "x"})."""
    content = copy.deepcopy(GOOD)
    for path, value in paths.items():
        *parents, last = path.split(".")
        place = content
        for part in parents:
            place = place.setdefault(part, {}) if isinstance(place, dict) else place[int(part)]
        place[int(last) if isinstance(place, list) else last] = value
    return content


def written(tmp_path, content):
    path = tmp_path / "mine.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def refusal(path):
    with pytest.raises(ScenarioError) as caught:
        load_cluster(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    return text


def test_a_good_file_becomes_domain_values(tmp_path):
    spec = load_cluster(written(tmp_path, GOOD))
    assert [group.name for group in spec.groups] == ["pair", "solo-0", "solo-1"]
    assert spec.parked == (False, True, True)
    assert [place.gpu.name for place in spec.groups[0].ranks] == ["A100-80G-SXM4", "L40S"]
    assert spec.groups[0].inner_link.name == "pcie4"
    assert spec.limits == ClusterLimits(context_tokens=8192)
    assert spec.gpus == 4
    assert spec.usd_per_hour == pytest.approx(3.67 + 1.86)  # the parked L4s cost nothing


def test_the_inner_link_left_out_is_the_slowest_of_the_cards(tmp_path):
    content = changed()
    del content["groups"][0]["inner_link"]
    assert load_cluster(written(tmp_path, content)).groups[0].inner_link.name == "pcie4"  # A100 has NVLink, L40S has none


def test_replica_numbers_fill_the_places(tmp_path):
    rank = {"gpu": "A100-80G-SXM4", "node": "n-{i//2}", "switch": "s-{i//2}{i%2}", "rack": "r{i//4}", "count": 4}
    content = changed(**{"groups.1": {"name": "replica", "count": 8, "ranks": [rank]}})
    groups = load_cluster(written(tmp_path, content)).groups[1:]
    places = [(group.ranks[0].node, group.ranks[0].switch, group.ranks[0].rack, len(group.ranks)) for group in groups]
    assert places == [(f"n-{i // 2}", f"s-{i // 2}{i % 2}", f"r{i // 4}", 4) for i in range(8)]


def test_limits_prices_and_faults_arrive(tmp_path):
    content = changed(
        limits={
            "max_running": 4,
            "queue_limit": 2,
            "hold_limit": 0,
            "kv_block_tokens": 8,
            "context_tokens": 4096,
            "kv_blocks": 17,
        },
        prices={"L40S": 1.0},
        faults=[{"kind": "slow_compute", "group": "solo-1", "start_s": 5, "length_s": 2.5, "rank": 0, "size": 3}],
    )
    spec = load_cluster(written(tmp_path, content))
    assert spec.limits == ClusterLimits(4, 2, 0, 8, 4096, 17)
    assert spec.groups[0].ranks[1].gpu.usd_per_hour == 1.0
    assert spec.faults == (ScriptedFault("slow_compute", 2, 5.0, 2.5, 0, 3.0),)


def test_a_file_brings_its_own_hardware_and_model(tmp_path):
    card = {"name": "Mine", "tflop_per_s": 10, "memory_gib": 8, "memory_gb_per_s": 100, "tdp_w": 50, "kernel_profile": "t4",
           "link": "usb", "source": "me"}  # fmt: skip
    cable = {"name": "usb", "latency_us": 100, "gb_per_s": 0.5, "source": "me"}
    shapes = {"name": "tiny", "layers": 2, "hidden": 64, "query_heads": 4, "kv_heads": 2, "head_dim": 16, "mlp_width": 128,
              "vocabulary": 512, "context_tokens": 2048, "source": "me"}  # fmt: skip
    content = {
        "name": "own", "own_gpus": [card], "own_links": [cable], "own_models": [shapes], "model": {"name": "tiny"},
        "groups": [{"name": "g", "ranks": [{"gpu": "Mine", "node": "n", "count": 2}]}],
    }  # fmt: skip
    spec = load_cluster(written(tmp_path, content))
    assert spec.groups[0].inner_link.beta_s_per_byte == pytest.approx(1 / 0.5e9)
    assert spec.groups[0].inner_link.alpha_s == pytest.approx(100e-6)
    assert spec.limits.context_tokens == 2048  # the model's, which is less than the default
    assert "Mine" not in load_gpus()  # the catalogue itself is untouched


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (changed(**{"groups.0.ranks.1.gpu": "L40"}), 'groups[0].ranks[1].gpu: GPU "L40" unknown; did you mean "L40S"?'),
        (changed(**{"model.name": "Llama-3-8B"}), 'model.name: model "Llama-3-8B" unknown; did you mean "Llama-3.1-8B"?'),
        (changed(**{"model.weight_dtype": "fp16x"}), 'model.weight_dtype: dtype "fp16x" unknown; did you mean "fp16"?'),
        (changed(**{"groups.0.inner_link": "pcie"}), 'groups[0].inner_link: link "pcie" unknown; did you mean "pcie'),
        (changed(**{"groups.0.outer_link": "wifi"}), 'groups[0].outer_link: link "wifi" unknown'),
        (changed(group=[]), 'key "group" unknown; did you mean "groups"?'),
        (
            changed(**{"groups.1.ranks.0.nodes": "x"}),
            'groups[1].ranks[0]: key "nodes" unknown; did you mean "node"? known: count, gpu',
        ),
        (changed(**{"limits.max_runing": 3}), 'limits: key "max_runing" unknown; did you mean "max_running"?'),
        (changed(**{"limits.max_running": 0}), "limits.max_running: 0 refused"),
        (changed(**{"limits.max_running": "12"}), "limits.max_running: '12' refused"),
        (changed(**{"limits.max_running": True}), "limits.max_running: True refused"),
        (changed(**{"limits.context_tokens": 200_000}), "limits.context_tokens: 200000 is beyond the 131072"),
        (changed(**{"groups.0.host_speed": float("nan")}), "groups[0].host_speed: nan refused"),
        (changed(**{"groups.0.host_speed": float("inf")}), "groups[0].host_speed: inf refused"),
        (changed(**{"groups.0.ranks": []}), "groups[0].ranks: [] refused"),
        (changed(groups=[]), "groups: [] refused"),
        (changed(groups=None), "groups: None refused"),
        (changed(name=3), "name: 3 refused"),
        ({"name": "x"}, "model: missing; add it (and 1 more)"),
        (changed(**{"groups.0.ranks.1.node": "n9"}), "groups[0].outer_link: missing; the group spans 2 nodes"),
        (
            changed(**{"groups.1.ranks": [{"gpu": "L4", "node": "n0", "rack": "r9"}]}),
            "groups: node 'n0' lies in rack '' and in 'r9'; name the nodes apart",
        ),
        (
            changed(**{"groups.0.ranks.0.switch": "s", "groups.1.ranks.0.switch": "s"}),
            "groups: switch 's' lies on node 'n0' and on 'n1'; name the switches apart",
        ),
        (changed(**{"groups.0.parked": True}), "every group is parked"),
        (changed(**{"groups.0.name": "solo-1"}), "group names solo-1 given twice"),
        (
            changed(**{"groups.1.count": 16}),
            "groups[1].ranks[0].node: 'n1' would put all 16 replicas on one node; write e.g. n1-{i}",
        ),
        (changed(**{"groups.1.ranks.0.node": "n-{j}"}), "groups[1].ranks[0].node: 'n-{j}' has a placeholder other than {i}"),
        (changed(**{"groups.1.ranks.0.node": "n-{i//0}"}), "has a placeholder other than"),
        (changed(prices={"L4O": 1.0}), 'prices: GPU "L4O" unknown'),
        (changed(prices={"L4": -1.0}), "prices.L4: -1.0 is negative"),
        (changed(faults=[{"kind": "fire", "group": "pair", "start_s": 0, "length_s": 1}]), "faults[0].kind: 'fire' refused"),
        (
            changed(faults=[{"kind": "lost_group", "group": "solo", "start_s": 0, "length_s": 1}]),
            'faults[0].group: group "solo" unknown',
        ),
        (
            changed(faults=[{"kind": "lost_rank", "group": "pair", "start_s": 0, "length_s": 1, "rank": 2}]),
            "faults[0].rank: 2, but group 'pair' has 2 rank(s); give 0 to 1",
        ),
    ],
)
def test_each_mistake_gets_one_line_naming_its_place(tmp_path, content, said):
    assert said in refusal(written(tmp_path, content))


def test_a_model_that_cannot_fit_is_refused_with_the_numbers(tmp_path):
    """8.03e9 parameters in bf16 are 16.06 GB; 90 % of 16 GiB are 15.46 GB. In int8 the half fits."""
    content = changed(**{"groups.1.ranks.0.gpu": "T4"})
    said = refusal(written(tmp_path, content))
    assert "groups[1] (solo-0): 'Llama-3.1-8B' needs 16.06 GB of weights (bf16)" in said
    assert "its 1 rank(s) offer 15.46 GB" in said
    content["model"]["weight_dtype"] = "int8"
    assert load_cluster(written(tmp_path, content)).gpus == 4


def test_the_memory_bound_counts_one_kv_block():
    """A card with room for the weights and half a block is refused, with room for a whole block it is not."""
    spec = model("SmolLM2-135M")
    block_bytes = spec.kv_bytes_per_token * 2**19  # half a million tokens: large enough to reach 1 GiB cards
    for share, is_enough in ((0.5, False), (1.01, True)):
        card = replace(gpu("L4"), memory_bytes=int((spec.weight_bytes + share * block_bytes) / group_check.USABLE_FRACTION))
        group = TpGroup("g", spec, (RankPlace(card, "n"),), link("pcie4"), link("pcie4"))
        assert (group_check.memory_problem(group, 2**19) is None) is is_enough


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_memory_bound_is_the_memory_model_of_the_planner(ranks):
    """Equal cards of a quarter GB more than they need by `memory_fit` pass, and an even plan then fits; a hundredth of that less
    than the least that any split needs is refused, though weights and KV alone would still fit."""
    spec = model("Llama-3.1-8B")
    even = proportional_plan(spec, [1.0] * ranks)
    need = (weight_bytes(spec, even) + workspace_bytes(spec, even) + 16 * kv_bytes_per_token(spec, even)).max()

    def group(usable_bytes: float) -> TpGroup:
        card = replace(gpu("L4"), memory_bytes=int(usable_bytes / group_check.USABLE_FRACTION) + 1)
        return TpGroup("g", spec, (RankPlace(card, "n"),) * ranks, link("pcie4"), link("pcie4"))

    roomy = group(need + 0.25e9)
    assert group_check.memory_problem(roomy, 16) is None and fits(roomy, even, 16, group_check.USABLE_FRACTION)
    least = spec.weight_bytes + 16 * spec.kv_bytes_per_token + workspace_floor_bytes(spec, ranks)
    tight = group((least - 0.01e9) / ranks)
    assert "GB of workspace" in (group_check.memory_problem(tight, 16) or "")
    assert (least - 0.01e9) > spec.weight_bytes + 16 * spec.kv_bytes_per_token
    with pytest.raises(InfeasibleSplit):
        corner_plan(tight, "memory", IDLE_MIX)


@pytest.mark.fault("K18")
def test_an_impossible_degree_is_refused_when_the_file_is_read(tmp_path):
    """SmolLM2-135M has 9 query heads and 3 KV heads: 10 ranks are one too many; 9, and the uneven 4, are offered."""
    content = changed(**{"model.name": "SmolLM2-135M", "groups.0.ranks": [{"gpu": "L4", "node": "n0", "count": 10}]})
    said = refusal(written(tmp_path, content))
    assert "groups[0] (pair): 10 ranks, but 'SmolLM2-135M' has 9 query heads" in said
    assert "possible degrees: 1 to 9 (even ones: 1, 3)" in said
    for degree in (4, 9):
        content["groups"][0]["ranks"][0]["count"] = degree
        assert len(load_cluster(written(tmp_path, content)).groups[0].ranks) == degree


@pytest.mark.fault("K18")
def test_even_degrees_of_the_known_models(tmp_path, shared):
    """even_tp of each model in the case's file is what divides everything; degrees up to the heads stay possible."""
    for row in json.loads((shared / "cases/inputs/model_heads.json").read_text())["models"]:
        shapes = {"name": row["name"], "layers": 2, "hidden": row["hidden"], "query_heads": row["heads"],
                  "kv_heads": row["kv_heads"],
                  "head_dim": row["hidden"] // row["heads"], "mlp_width": row["ffn"], "vocabulary": row["vocab"],
                  "context_tokens": 2048, "source": "case"}  # fmt: skip
        content = changed(own_models=[shapes], limits={"context_tokens": 2048}, **{"model.name": row["name"]})
        for degree in (*row["even_tp"], *row["not_even_tp"]):
            content["groups"][0]["ranks"] = [{"gpu": "L4", "node": "n0", "count": degree}]
            if degree <= row["heads"]:
                spec = load_cluster(written(tmp_path, content))
                assert (degree in group_check.even_degrees(spec.model)) is (degree in row["even_tp"])
            else:
                assert f"possible degrees: 1 to {row['heads']}" in refusal(written(tmp_path, content))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- b\n", "holds a list, expected a mapping"),
        ("just words", "holds a str, expected a mapping"),
        ("name: [1, 2\n", "line 2, column 1: "),
        ("name: a\nname: b\n", "line 2, column 1: key 'name' is given twice"),
        ("name: a\n? [1, 2]\n: b\n", "a key must be a plain word"),
        ("name: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("name: \x07\n", "special characters are not allowed"),
        ("a: " + "[" * 40 + "]" * 40, "nested deeper than 16 levels"),
        ("a: &x [1]\nb: *x\n", "line 2: alias *'x' is not allowed"),
        ("name: a\n---\nname: b\n", "expected a single document"),
        ("when: 2024-13-45\n", "not readable as YAML"),
        ("x: " + "a" * 300_000, "more than 262144 bytes"),
    ],
)
def test_unusable_text_gets_one_line(tmp_path, text, said):
    assert said in refusal(written(tmp_path, text))


def test_a_yaml_bomb_is_refused_at_once(tmp_path):
    """Nine levels of ten aliases each would be 10^9 nodes."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    start_s = time.perf_counter()
    assert "alias" in refusal(written(tmp_path, "\n".join(levels)))
    assert time.perf_counter() - start_s < 2.0


def test_huge_counts_are_refused_at_once(tmp_path):
    content = changed(**{"groups.1": {"name": "g", "count": 1024, "ranks": [{"gpu": "L4", "node": "n{i}", "count": 32}]}})
    assert "more than 4096 GPUs" in refusal(written(tmp_path, content))


def test_a_file_that_is_not_there_a_folder_a_pipe_and_bytes(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.yaml")
    assert "is a folder" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "is not a plain file" in refusal(tmp_path / "pipe.yaml")
    (tmp_path / "latin.yaml").write_bytes("name: caf\u00e9".encode("latin-1"))
    assert "byte 9 is not UTF-8" in refusal(tmp_path / "latin.yaml")
    with pytest.raises(ScenarioError, match="not a usable path"):
        load_cluster("a\0b.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file(tmp_path):
    path = written(tmp_path, GOOD)
    path.chmod(0)
    assert "Permission denied" in refusal(path)


def test_an_unknown_cluster_name_lists_the_ready_ones():
    with pytest.raises(ScenarioError, match='cluster "mixed8" unknown; did you mean "mixed-8"\\? known: a100-70b-16'):
        load_cluster("mixed8")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["L4", "pcie4", "{i}"])
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3))
PATHS = (
    "name",
    "model",
    "model.name",
    "model.kv_dtype",
    "groups",
    "groups.0",
    "groups.0.name",
    "groups.0.ranks",
    "groups.0.ranks.0",
    "groups.0.ranks.0.gpu",
    "groups.0.ranks.0.node",
    "groups.0.ranks.0.count",
    "groups.1.count",
    "groups.0.inner_link",
    "groups.0.host_speed",
    "groups.0.parked",
    "limits",
    "limits.queue_limit",
    "prices",
    "prices.L4",
    "faults",
    "own_gpus",
    "own_models",
)


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from(PATHS), value=TREES)
def test_any_value_anywhere_is_taken_or_refused_in_one_line(tmp_path_factory, path, value):
    """No other exception, whatever stands in the file."""
    file = tmp_path_factory.mktemp("any") / "any.yaml"
    content = changed(**{path: value})
    file.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    try:
        spec = load_cluster(file)
    except ScenarioError as error:
        assert "\n" not in str(error)
    else:
        assert spec.groups


def test_the_example_in_the_documentation_loads(tmp_path):
    text = (Path(__file__).resolve().parents[3] / "docs/clusters.md").read_text(encoding="utf-8")
    example = text.split("```yaml\n")[1].split("```")[0]
    spec = load_cluster(written(tmp_path, example))
    assert [group.ranks[0].node for group in spec.groups] == ["box-0", "shelf-0", "shelf-0", "shelf-1", "shelf-1"]


EXPECTED = {
    "a100-70b-16": (16, 64, 0),
    "consumer-2": (1, 2, 0),
    "consumer-2-apart": (2, 2, 0),
    "mixed-70b": (8, 19, 0),
    "mixed-8": (8, 11, 0),
    "racks-64": (19, 64, 3),
    "two-nodes-70b": (2, 8, 0),
    "unlike-3": (2, 3, 0),
}


def test_the_ready_clusters_are_what_they_are_called():
    assert set(ready_clusters()) == set(EXPECTED)
    for name, (groups, gpus, parked) in EXPECTED.items():
        spec = load_cluster(name)
        assert spec.name == name
        assert (len(spec.groups), spec.gpus, sum(spec.parked)) == (groups, gpus, parked)
        assert spec.description


def test_racks_64_has_five_kinds_in_four_racks_and_whole_nodes_of_at_most_eight():
    ranks = [place for group in load_cluster("racks-64").groups for place in group.ranks]
    assert len({place.gpu.name for place in ranks}) == 5
    assert len({place.rack for place in ranks}) == 4
    nodes = [place.node for place in ranks]
    assert max(nodes.count(node) for node in set(nodes)) == 8
    switches = [place.switch for place in ranks]
    assert all(switches)


def test_the_70b_group_spans_two_nodes_of_unlike_gpus():
    group = load_cluster("two-nodes-70b").groups[0]
    assert group.domains == ((0, 1), (2, 3))
    assert len({place.gpu.name for place in group.ranks}) == 2
    assert group.model.weight_bytes > 140 * GB


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_ready_group_holds_a_long_request_under_the_exact_memory_fit(name):
    """The bound in this package is loose; the memory fit also counts workspace and whole heads: 4,096 tokens must fit."""
    memory_fit = pytest.importorskip("envs.perf_model.memory_fit", reason="the memory fit is not here yet")
    for group in load_cluster(name).groups:
        assert len(memory_fit.smallest_subset(group, request_tokens=4096)) <= len(group.ranks), group.name
