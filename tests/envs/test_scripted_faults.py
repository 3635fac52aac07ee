"""Faults of a cluster file strike the simulated world, at their time and place."""

from __future__ import annotations

import numpy as np

from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.faults import FaultEvent, FaultKind
from envs.scenario.cluster_file import load_cluster
from envs.scenario.cluster_spec import FAULT_KINDS
from envs.traces.synthetic_twin import synthesize
from envs.world_sampler import WorldSampler

FILE = """
name: faulty
model: {name: Mistral-7B}
groups:
  - {name: pair, ranks: [{gpu: RTX4090, node: a, count: 2}]}
  - {name: single, ranks: [{gpu: L40S, node: b}]}
faults:
  - {kind: slow_memory, group: pair, rank: 1, start_s: 2.5, length_s: 4.0, size: 3.0}
  - {kind: lost_group, group: single, start_s: 1.0, length_s: 60.0}
"""


def test_scripted_faults_reach_the_world(tmp_path):
    path = tmp_path / "faulty.yaml"
    path.write_text(FILE)
    trace = synthesize("azure-conv", 60.0, rng=np.random.default_rng(0))
    sampler = WorldSampler(trace, (0.0, 50.0), (load_cluster(path),), 20, (1.0, 1.0), fault_rates=None)
    world = sampler(np.random.default_rng(1))
    assert world.faults == (
        FaultEvent(FaultKind.SLOW_MEMORY, 2.5, 4.0, 0, 1, 3.0),
        FaultEvent(FaultKind.LOST_GROUP, 1.0, 60.0, 1, -1, 2.0),
    )
    cluster = ClusterProcess(world)
    while (point := cluster.next_decision()) is not None and cluster.env.now < 5.0:
        if point.view.now_s > 2.1:
            assert not point.view.is_up[1], "the lost group is noticed within 1 s and stays down"
        if point.view.now_s > 2.5:
            assert cluster.groups.health[0].slow_memory.tolist() == [1.0, 3.0]
        cluster.apply(point, 0)
    assert cluster.env.now > 2.5


def test_every_kind_of_the_file_is_a_kind_of_the_world():
    assert {kind.upper() for kind in FAULT_KINDS} == {kind.name for kind in FaultKind}
