"""The report's table of devices and groups: ranks and affinities that a reader can check."""

from __future__ import annotations

import numpy as np
import pytest

from agents.capability_table import capability_rows
from envs.decision.capability import FEATURES
from envs.scenario.cluster_file import load_cluster
from envs.traces import TraceRow, mix, table_of_rows


def traffic():
    rows = [[TraceRow(float(i), 800, 100, name) for i in range(5)] for name in ("code", "batch")]
    return mix([table_of_rows(part, "made up") for part in rows])


def test_rows_of_the_default_cluster():
    """Eight groups and their seven kinds of GPU. The H100 SXM computes and reads fastest; the pair of them is the first group in
    decode. What code needs more of than batch does, the strong groups have: the H100 pair suits code, the A40s batch."""
    rows = capability_rows((load_cluster("mixed-70b"),), traffic(), ())
    groups = {row["name"]: row for row in rows if row["kind"] == "group"}
    devices = {row["name"]: row for row in rows if row["kind"] == "device"}
    assert len(groups) == 8 and len(devices) == 6 + ("H100-PCIe" in devices)
    assert devices["H100-SXM5"]["prefill_rank"] == devices["H100-SXM5"]["decode_rank"] == 1
    assert groups["h100-pair"]["decode_rank"] == 1
    assert sorted(row["prefill_rank"] for row in groups.values()) == list(range(1, 9))
    assert groups["h100-pair"]["affinity"]["code"] > 0 > groups["h100-pair"]["affinity"]["batch"]
    assert groups["a40-l40s"]["affinity"]["batch"] > groups["a40-l40s"]["affinity"]["code"]
    assert set(groups["h100-pair"]["affinity"]) == {"code", "batch"}


def test_measured_steps_show_and_count_in_the_ranking():
    """The H100 pair measured at ten times its declared step: ln 10 / ln 1.25 units, and no longer first in decode."""
    cluster = load_cluster("mixed-70b")
    slow = [10.0, *[1.0] * 7]
    rows = capability_rows((cluster,), traffic(), [{"cluster": "mixed-70b", "slowest_rank_ratio": slow}])
    pair = next(row for row in rows if row["name"] == "h100-pair")
    assert pair["vector"][FEATURES.index("step_time")] == pytest.approx(np.log(10) / np.log(1.25), abs=1e-3)
    assert pair["decode_rank"] == 8
