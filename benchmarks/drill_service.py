"""The service under drill: its files, its process and those below it, what it says in its log, and what of it is left at the end."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.router_processes import Router, get, wait_for
from benchmarks.tp_drill import LEFT_AFTER_S, marked, segments
from runtime.backends.group_host import PROCESS_NAME
from runtime.torch_tp.config import ModelConfig
from runtime.torch_tp.nursery_process import PROCESS_NAME as NURSERY_NAME
from runtime.torch_tp.process_name import process_name

MARK = "BALLAST_DRILL"
START_S = 300.0
RUNNING_MAX = 8
LOST = re.compile(r"group=(?P<group>\S+) rank lost worker=|group lost group=(?P<gone>\S+)")


@dataclass(frozen=True, slots=True)
class Noticed:
    """The service said that a rank of a group was lost, or the group as a whole; at_s: monotonic."""

    at_s: float
    group: str
    is_whole_group: bool


def write_files(folder: Path, model: Path, config: ModelConfig, groups: Mapping[str, Sequence[float]]) -> Path:
    """A service file and its cluster file. groups: by name, the EMULATED slowness of each rank."""
    factors = sorted({factor for ranks in groups.values() for factor in ranks})
    limits = {
        "max_running": RUNNING_MAX, "queue_limit": 64, "hold_limit": 128, "context_tokens": min(config.context_tokens, 512),
        "kv_block_tokens": 16, "kv_blocks": RUNNING_MAX * min(config.context_tokens, 512) // 16,
    }  # fmt: skip
    cluster = {
        "name": "drill",
        "model": {"name": "drilled", "weight_dtype": "fp32", "kv_dtype": "fp32"},
        "groups": [
            {"name": name, "ranks": [{"gpu": f"core-{factor:g}", "node": "here"} for factor in ranks],
             "inner_link": "pcie4", "outer_link": "pcie4"} for name, ranks in groups.items()
        ],
        "limits": limits,
        "own_gpus": [
            {"name": f"core-{factor:g}", "tflop_per_s": 0.05 / factor, "memory_gib": 4.0, "memory_gb_per_s": 10.0 / factor, "tdp_w": 30.0,
             "kernel_profile": "t4", "link": "pcie4", "has_bf16": False, "source": "a guess"} for factor in factors
        ],
        "own_models": [{
            "name": "drilled", "layers": config.layers, "hidden": config.hidden, "query_heads": config.query_heads,
            "kv_heads": config.kv_heads, "head_dim": config.head_dim, "mlp_width": config.mlp_width, "vocabulary": config.vocabulary,
            "context_tokens": config.context_tokens, "tied_embeddings": config.tied, "source": "its config.json",
        }],
    }  # fmt: skip
    service = {
        "cluster": "cluster.yaml",
        "model": {"name": "drilled", "path": str(model)},
        "groups": {
            name: {"kind": "torch_tp", "ranks": [{"slow_factor": factor, "speed": 1.0 / factor} for factor in ranks]}
            for name, ranks in groups.items()
        },
        "dispatch": {"restart_s": 0.2},
        "records": {"dir": "records", "observations": False},
    }  # fmt: skip
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(service))
    return file


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children(pid: int) -> list[int]:
    """Child processes, [] where it is gone."""
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return []


def words(pid: int) -> list[str]:
    """Its command line, [] where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


class DrilledService(Router):
    """`python -m runtime serve` on a free port. groups: how many ranks each is to have."""

    def __init__(self, file: Path, groups: Mapping[str, int]) -> None:
        self.groups, self.records = dict(groups), file.parent / "records"
        self.hosts_seen: set[int] = set()
        self.log_file = file.parent / "service.log"
        self._mark, self._read, self._port = uuid.uuid4().hex, 0, free_port()
        command = (sys.executable, "-m", "runtime", "serve", "--config", str(file), "--port", str(self._port))
        os.environ[MARK] = self._mark  # for those started from now on
        try:
            super().__init__("service", f"http://127.0.0.1:{self._port}", command, self.log_file)
        finally:
            del os.environ[MARK]

    def wait(self) -> None:
        """Until every group serves with all of its ranks. Raises: TimeoutError, RuntimeError."""
        wait_for(f"{self.url}/livez", [self.process])
        end_s = time.monotonic() + START_S
        while not all(self.is_whole(group) for group in self.groups):
            if time.monotonic() > end_s:
                raise TimeoutError(f"the groups did not come up; see {self.log_file}")
            time.sleep(0.1)

    def state(self) -> list[dict[str, Any]]:
        """Its groups, as /admin/state has them."""
        found: list[dict[str, Any]] = json.loads(get(f"{self.url}/admin/state"))["groups"]
        return found

    def is_whole(self, name: str, state: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Whether a group serves and no rank of it is missing."""
        group = next(group for group in (self.state() if state is None else state) if group["name"] == name)
        has_all = len(self.ranks(name)) == self.groups[name] and all(rank["is_member"] for rank in group["ranks"])
        return has_all and group["state"] == "serving" and not group["plan"]["is_moving"]

    def host(self, group: str) -> int | None:
        """Process of the group's engine."""
        near = children(self.process.pid)
        candidates = [*near, *(pid for nursery in near for pid in children(nursery))]
        found = next((pid for pid in candidates if process_name(pid) == f"{PROCESS_NAME} {group}"), None)
        if found is not None:
            self.hosts_seen.add(found)
        return found

    def ranks(self, group: str) -> list[int]:
        """Processes of its ranks: the children of its nursery."""
        host = self.host(group)
        nurseries = [] if host is None else [pid for pid in children(host) if process_name(pid) == NURSERY_NAME]
        return [rank for nursery in nurseries for rank in children(nursery)]

    def news(self) -> Iterator[Noticed]:
        """Losses that it has logged since the last call."""
        with self.log_file.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read += whole
        now_s = time.monotonic()
        for line in data[:whole].decode(errors="replace").splitlines():
            if found := LOST.search(line):
                yield Noticed(now_s, found["group"] or found["gone"], found["group"] is None)

    def served_by(self) -> dict[str, tuple[str, int]]:
        """By request id, the group that ended the request and how many attempts it took."""
        found = {}
        for file in sorted(self.records.glob("requests-*.jsonl")):
            for line in file.read_text().splitlines()[1:]:
                extra = json.loads(line)["extra"]
                found[extra["request"].rpartition("-")[0]] = (extra.get("group", ""), extra.get("attempts", 0))
        return found

    def processes(self) -> list[int]:
        """All that descend from it, however they came about."""
        return marked(f"{MARK}={self._mark}")

    def left(self) -> list[str]:
        """What is still there 5 s after its end: processes, shared memory, its port."""
        end_s = time.monotonic() + LEFT_AFTER_S
        while (found := self._remains()) and time.monotonic() < end_s:
            time.sleep(0.05)
        return found

    def _remains(self) -> list[str]:
        processes = [f"process {pid}: {process_name(pid)} {' '.join(words(pid))}" for pid in self.processes()]
        shared = [name for pid in self.hosts_seen for name in segments(pid)]
        with socket.socket() as probe:
            ports = [f"port {self._port}"] if probe.connect_ex(("127.0.0.1", self._port)) == 0 else []
        return processes + shared + ports


@contextmanager
def drilled(folder: Path, model: Path, config: ModelConfig, groups: Mapping[str, Sequence[float]]) -> Iterator[DrilledService]:
    """A service whose groups are all up; stopped at the end."""
    file = write_files(folder, model, config, groups)
    with DrilledService(file, {name: len(ranks) for name, ranks in groups.items()}) as service:
        service.wait()
        yield service
