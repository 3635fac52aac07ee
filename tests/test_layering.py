"""Imports point one way: every module's `ast` against the table of layers, each fault named as file:line."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
ROOTS = ("envs", "agents", "runtime")
STDLIB = frozenset(sys.stdlib_module_names)

BASE = ("envs.domain", "envs.perf_model", "envs.group_kernel", "envs.decision")
TRAINING = (
    "numpy", "numba", "scipy", "pandas", "sklearn", "torch", "gymnasium", "stable_baselines3", "sb3_contrib", "tensorboard",
    "matplotlib", "rich", "pydantic", "yaml", "safetensors", "zstandard",
)  # fmt: skip
WEB = (
    "numpy", "numba", "llvmlite", "torch", "safetensors", "pydantic", "yaml", "zstandard", "starlette", "uvicorn", "anyio", "httpx",
    "uvloop", "httptools", "websockets", "aiohttp", "msgspec", "prometheus_client", "opentelemetry",
    "tokenizers", "jinja2", "gguf", "rich", "ray",
)  # fmt: skip
# the simulated world and what is built straight on it; named one by one, so that a module without a layer is noticed
SIMULATION = ("envs.cluster", "envs.scheduling_env", "envs.default_worlds", "envs.unloaded", "envs.world_sampler")

EVIDENCE = ("agents.evaluation_file", "agents.statistics")


@dataclass(frozen=True)
class Layer:
    """What the modules under `package` may import: prefixes of our own, and third-party packages."""

    package: str
    ours: tuple[str, ...]
    third_party: tuple[str, ...]


LAYERS = (
    Layer("envs.domain", BASE[:1], ("numpy", "numba")),
    Layer("envs.perf_model", BASE[:2], ("numpy", "numba")),
    Layer("envs.group_kernel", BASE[:3], ("numpy", "numba")),
    Layer("envs.decision", BASE, ("numpy", "numba")),
    # yaml beyond the table of the style guide: one public trace format is a YAML file
    Layer("envs.traces", (*BASE[:3], "envs.traces"), ("numpy", "zstandard", "yaml")),
    Layer("envs.scenario", (*BASE[:3], "envs.scenario"), ("numpy", "pydantic", "yaml")),
    *(Layer(package, ("envs",), ("numpy", "numba", "simpy", "gymnasium")) for package in SIMULATION),
    Layer("agents.heuristics", (*BASE, "agents.heuristics"), ("numpy", "safetensors")),
    Layer("agents.policy_bundle", (*BASE, "agents.policy_bundle", "agents.whole_files"), ("numpy", "safetensors")),
    Layer("agents.whole_files", (), ()),  # the standard library alone: whoever reads or writes files may use it
    # what a rollout reads of an evaluation: numpy, nothing that trains
    *(Layer(module, ("agents.policy_bundle", "agents.whole_files"), ("numpy",)) for module in EVIDENCE),
    Layer("agents", ("envs", "agents"), TRAINING),
    Layer(
        "runtime",
        (*BASE, "envs.scenario", "envs.traces", "agents.heuristics", "agents.policy_bundle", "agents.whole_files", *EVIDENCE, "runtime"),
        WEB,
    ),
)


def layer_of(module: str) -> Layer | None:
    """The most particular layer that `module` belongs to."""
    fitting = [layer for layer in LAYERS if is_within(module, layer.package)]
    return max(fitting, key=lambda layer: len(layer.package), default=None)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, module: str, is_package: bool) -> list[tuple[int, str]]:
    """(line, dotted name) of every import: relative, type-only, inside functions, and importlib with a plain string."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + is_package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from envs import cluster` imports envs.cluster; of other packages the name in front of `import` decides
            deep = source in ROOTS
            found += [(node.lineno, f"{source}.{alias.name}" if deep else source) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.append((node.lineno, node.args[0].value))
    return list(dict.fromkeys(found))


def wrong_imports(root: Path) -> list[str]:
    """`file:line: what is wrong` for every import under `root` that the table does not allow."""
    wrong: list[str] = []
    for path in sorted(path for top in ROOTS for path in (root / top).rglob("*.py")):
        module = module_name(path, root)
        layer = layer_of(module)
        where = path.relative_to(root).as_posix()
        source = path.read_text(encoding="utf-8")
        if module in ROOTS:
            if source.strip():
                wrong.append(f"{where}:1: {module} must stay empty: importing a layer must not pull in its neighbours")
            continue
        if layer is None:
            wrong.append(f"{where}:1: {module} belongs to no layer; move it, or add its layer to this table")
            continue
        for line, name in imported(ast.parse(source), module, path.name == "__init__.py"):
            top = name.split(".")[0]
            if top in ROOTS:
                allowed = any(is_within(name, prefix) for prefix in layer.ours) or name == top
                rule = f"{layer.package} may import of ours only {', '.join(layer.ours)}"
            else:
                allowed = top in STDLIB or top in layer.third_party
                rule = f"{layer.package} may import of others only {', '.join(layer.third_party)}"
            if not allowed:
                wrong.append(f"{where}:{line}: imports {name}; {rule}")
    return wrong


def test_imports_point_one_way():
    assert wrong_imports(PROJECT) == []


def test_roots_exist_so_that_the_walk_is_not_empty():
    assert len(list((PROJECT / "envs").rglob("*.py"))) > 10


@pytest.mark.parametrize(
    ("file", "source", "said"),
    [
        ("envs/domain/a.py", "import os\nfrom envs.decision import actions\n", "envs/domain/a.py:2: imports envs.decision"),
        ("envs/domain/a.py", "import pydantic\n", "envs/domain/a.py:1: imports pydantic"),
        ("envs/perf_model/a.py", "def f():\n    import pandas\n", "envs/perf_model/a.py:2: imports pandas"),
        ("envs/perf_model/a.py", "from ..cluster import faults\n", "envs/perf_model/a.py:1: imports envs.cluster"),
        ("envs/perf_model/__init__.py", "from ..cluster import faults\n", "envs/perf_model/__init__.py:1: imports envs.cluster"),
        ("envs/group_kernel/a.py", "import simpy\n", "imports simpy"),
        ("envs/decision/a.py", "from envs import cluster\n", "imports envs.cluster"),
        ("envs/decision/a.py", "import importlib\nimportlib.import_module('torch')\n", "envs/decision/a.py:2: imports torch"),
        ("envs/scenario/a.py", "import envs.cluster.world\n", "imports envs.cluster.world"),
        ("envs/cluster/a.py", "from agents.heuristics import x\n", "imports agents.heuristics"),
        ("envs/scheduling_env.py", "import stable_baselines3\n", "imports stable_baselines3"),
        ("agents/heuristics/a.py", "from envs.cluster import world\n", "imports envs.cluster"),
        ("agents/policy_bundle.py", "import torch\n", "agents/policy_bundle.py:1: imports torch"),
        ("agents/policy_bundle.py", "from agents import ppo_training\n", "imports agents.ppo_training"),
        ("agents/training.py", "import runtime.service\n", "imports runtime.service"),
        ("runtime/a.py", "from agents.ppo_training import x\n", "imports agents.ppo_training"),
        ("runtime/a.py", "from envs.cluster import world\n", "imports envs.cluster"),
        ("runtime/a.py", "import gymnasium\n", "imports gymnasium"),
        ("runtime/a.py", "if TYPE_CHECKING:\n    import simpy\n", "runtime/a.py:2: imports simpy"),
        ("envs/common.py", "", "envs/common.py:1: envs.common belongs to no layer"),
        ("agents/__init__.py", "import numpy\n", "agents/__init__.py:1: agents must stay empty"),
    ],
)
def test_a_bad_import_is_caught(tmp_path, file, source, said):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    faults = wrong_imports(tmp_path)
    assert len(faults) == 1
    assert said in faults[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("envs/domain/a.py", "from __future__ import annotations\nimport numpy as np\nfrom envs.domain.specs import GpuSpec\n"),
        ("envs/perf_model/a.py", "from . import b\nfrom .b import c\nfrom envs.domain import specs\n"),
        ("envs/scenario/a.py", "import yaml\nfrom pydantic import BaseModel\nfrom envs.perf_model import memory_fit\n"),
        ("envs/cluster/a.py", "import simpy\nfrom envs.decision import actions\n"),
        ("agents/heuristics/a.py", "from agents.heuristics.b import x\nfrom envs.group_kernel import queue\n"),
        ("agents/ppo_training.py", "import torch\nfrom agents.policy_bundle import x\nfrom envs.scheduling_env import y\n"),
        ("runtime/a.py", "import torch\nfrom agents.policy_bundle import x\nfrom envs.traces import trace_row\n"),
    ],
)
def test_a_good_import_passes(tmp_path, file, source):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert wrong_imports(tmp_path) == []


LIGHT_IMPORTS = (
    ("agents.policy_bundle", ("torch", "stable_baselines3", "sb3_contrib", "gymnasium", "simpy")),
    ("envs.domain.plans", ("torch", "gymnasium", "simpy", "pydantic", "pandas")),
    ("envs.scenario.cluster_file", ("torch", "gymnasium", "simpy", "pandas")),
    ("runtime.torch_tp.tokenizer", ("torch", "gguf", "simpy", "transformers")),
    ("runtime.torch_tp.model", ("gguf", "simpy", "transformers")),
    ("runtime.calls", ("torch", "simpy", "starlette")),
    ("runtime.gateway.app", ("torch", "stable_baselines3", "gymnasium", "simpy", "transformers", "pandas", "scipy")),
    ("runtime.gateway.server", ("torch", "stable_baselines3", "gymnasium", "simpy", "transformers", "pandas", "scipy")),
    ("runtime.online_scheduler", ("stable_baselines3", "sb3_contrib", "gymnasium", "simpy")),
)


@pytest.mark.parametrize(("module", "heavy"), LIGHT_IMPORTS)
def test_a_fresh_interpreter_loads_nothing_heavy(module, heavy):
    """What the ast cannot see: a light module must not load a heavy package through others."""
    path = PROJECT / (module.replace(".", "/") + ".py")
    if not path.exists() and not path.with_suffix("").is_dir():
        pytest.skip(f"{module} does not exist yet")
    code = f"import sys, {module}\nprint(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
