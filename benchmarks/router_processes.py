"""The processes of the router benchmark: scripted backends, the service in front of them, other routers beside it, and what they use."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

PORTS = (9101, 9102, 9103, 9104)
"""Those that the peers' configurations name."""
GATEWAY_PORT = 8123
PROJECT = Path(__file__).resolve().parent.parent
START_S = 120.0
ANSWER_S = 30.0
CLUSTER: dict[str, Any] = {
    "name": "four-servers",
    "description": "four alike servers",
    "model": {"name": "Llama-3.1-8B"},
    "groups": [{"name": "server", "count": 4, "ranks": [{"gpu": "L4", "node": "node-{i}"}], "outer_link": "ethernet-10g"}],
    "limits": {"max_running": 512, "queue_limit": 1024, "hold_limit": 1024, "context_tokens": 8192},
}
WITHOUT_LOAD_PAGE = "import sys, mock_backend; mock_backend.State.metrics = lambda state: b''; mock_backend.main()"


def bench_folder() -> Path | None:
    """Where the shared router benchmark lies; None where it does not."""
    shared = Path(os.environ.get("BALLAST_SHARED", PROJECT.parent / "shared"))
    folder = shared / "router_bench"
    return folder if (folder / "bench.py").is_file() else None


def load_bench(folder: Path) -> ModuleType:
    """bench.py as a module: its load generators and its way to read what processes use."""
    spec = importlib.util.spec_from_file_location("router_bench", folder / "bench.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
        return bytes(answer.read())


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return bytes(answer.read())


class Backends(AbstractContextManager["Backends"]):
    """Four scripted servers, a process each. itl_ms: between two tokens, one for all or one each."""

    def __init__(self, folder: Path, tokens: int = 20, itl_ms: Sequence[float] = (0,), has_load_page: bool = True) -> None:
        gaps = list(itl_ms) * (len(PORTS) if len(itl_ms) == 1 else 1)
        program = [str(folder / "mock_backend.py")] if has_load_page else ["-c", WITHOUT_LOAD_PAGE]
        self.processes = [
            subprocess.Popen(
                [sys.executable, *program, "--ports", str(port), "--tokens", str(tokens), "--itl-ms", str(gap), "--ttft-ms", str(gap)],
                env={**os.environ, "PYTHONPATH": str(folder)},
            )
            for port, gap in zip(PORTS, gaps, strict=True)
        ]
        time.sleep(0.3)  # one whose port is taken has ended by then
        for port in PORTS:
            wait_for(f"http://127.0.0.1:{port}/health", self.processes)

    def fault(self, which: Sequence[int], mode: str, n: int = 0, count: int = 0) -> None:
        """count: requests that it strikes, 0 for all until another fault is set."""
        for i in which:
            post(f"http://127.0.0.1:{PORTS[i]}/mock/fault", {"mode": mode, "n": n, "count": count})

    def stats(self) -> list[dict[str, Any]]:
        return [json.loads(get(f"http://127.0.0.1:{port}/mock/stats")) for port in PORTS]

    def total(self, name: str) -> int:
        return sum(int(stats[name]) for stats in self.stats())

    def kill(self, which: int) -> None:
        self.processes[which].kill()
        self.processes[which].wait()

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class Router(AbstractContextManager["Router"]):
    """A router's process in front of the backends."""

    def __init__(self, name: str, url: str, command: Sequence[str], log: Path) -> None:
        self.name, self.url, self._log = name, url, log.open("w")
        self.process = subprocess.Popen(command, cwd=PROJECT, stdout=self._log, stderr=self._log)

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def wait(self) -> None:
        wait_for_answer(self.url, [self.process])


REQUEST_TIMEOUT_S = 900.0  # the streams of the long drill take ten minutes, which is what a request may take by itself


class Gateway(Router):
    """Our service. Its own process, and the policy's, which is its child."""

    def __init__(self, folder: Path, bundle: Path, scheduler: dict[str, float] | None = None) -> None:
        """scheduler: of the service file, where not all is to be as it comes."""
        (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
        groups = {f"server-{i}": {"kind": "openai_http", "url": f"http://127.0.0.1:{port}"} for i, port in enumerate(PORTS)}
        service = {
            "cluster": "cluster.yaml", "model": {"name": "mock"}, "bundle": str(bundle), "groups": groups, "port": GATEWAY_PORT,
            "scheduler": scheduler or {}, "gateway": {"request_timeout_s": REQUEST_TIMEOUT_S},
        }  # fmt: skip
        (folder / "service.yaml").write_text(yaml.safe_dump(service))
        command = (sys.executable, "-m", "runtime", "serve", "--config", str(folder / "service.yaml"))
        super().__init__("ballast", f"http://127.0.0.1:{GATEWAY_PORT}", command, folder / "ballast.log")

    def wait(self) -> None:
        """Until all groups serve and its policy is ready; asks for no answer, which slow servers may take long over."""
        wait_for(f"{self.url}/livez", [self.process])
        end_s = time.monotonic() + START_S
        while not self._is_ready(self.metrics()):
            if time.monotonic() > end_s:
                raise RuntimeError(f"the service did not get ready within {START_S:g} s; see {self._log.name}")
            time.sleep(0.1)

    def _is_ready(self, metrics: dict[str, float]) -> bool:
        serving = sum(value for name, value in metrics.items() if name.startswith("ballast_group_serving"))
        return metrics.get('ballast_policy_state{state="ready"}') == 1.0 and serving == len(PORTS)

    def metric(self, name: str) -> float:
        """A series of /metrics by its name and labels as written there; 0 where it is absent."""
        return self.metrics().get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        lines = (line.rpartition(" ") for line in get(f"{self.url}/metrics").decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def decisions(self) -> tuple[float, float]:
        """Route decisions made by the policy, and all."""
        found = {name: value for name, value in self.metrics().items() if name.startswith("ballast_decisions_total")}
        return sum(value for name, value in found.items() if 'source="policy"' in name), sum(found.values())

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]

    def memory_mib(self, key: str = "VmRSS") -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def peer(name: str, environment: Path | None, folder: Path, scratch: Path) -> Router | str:
    """Another router, started as `targets.json` says; why not, in words, where it is not here."""
    program = {"nginx": "nginx", "haproxy": "haproxy"}.get(name)
    if program is not None and not any((Path(part) / program).is_file() for part in os.environ["PATH"].split(":")):
        return f"{name}: no program {program} on this machine"
    if program is None and (environment is None or not (environment / "bin" / "python").is_file()):
        return f"{name}: give --peer-env, a virtual environment that holds it"
    target = json.loads((folder / "targets.json").read_text()).get(name)
    if target is None:
        return f"{name}: targets.json does not know it"
    (scratch / "router-bench").mkdir(exist_ok=True)
    words = target["cmd"].replace("{here}", str(folder)).split()
    if program is None:
        words[0] = str(environment / "bin" / Path(words[0]).name)  # type: ignore[operator]
    words = [word.replace("{tmp}", str(scratch)) for word in words]
    return Router(name, target["url"], words, scratch / f"{name}.log")


def wait_for(url: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    end_s = time.monotonic() + START_S
    while True:
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"a process behind {url} did not start; is its port taken?")
        try:
            get(url)
            return
        except OSError as error:
            if time.monotonic() > end_s:
                raise RuntimeError(f"{url} did not answer: {error}") from error
            time.sleep(0.05)


def wait_for_answer(url: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until a completion comes through."""
    end_s = time.monotonic() + START_S
    while True:
        try:
            post(f"{url}/v1/chat/completions", {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20})
            return
        except OSError as error:
            if time.monotonic() > end_s or any(process.poll() is not None for process in processes):
                raise RuntimeError(f"{url} did not serve: {error}") from error
            time.sleep(0.2)
