"""Every example in the documentation runs: Python blocks are executed, YAML blocks loaded, commands run where they are cheap and
else put through their own parser; every path that is named exists."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from agents import heuristics
from agents.experiment_config import load_experiment
from envs.scenario.cluster_file import load_cluster
from runtime.service_config import load_service

PROJECT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "docs/extending.md", "docs/experiments.md", "docs/simulator.md", "docs/tp_engine.md", "docs/service.md"]
PYTHON_PAGES = ["docs/extending.md", "docs/experiments.md", "docs/simulator.md"]
CHEAP = ("envs.scenario", "envs.traces inspect")
"""Beginnings of commands that are run outright."""
REQUESTS_CSV = "ts,in,out\n0,120,30\n250,80,12\n900,400,77\n"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """Fenced blocks of a page with the number of their first line."""
    found: list[Block] = []
    language, begin, held = None, 0, []
    for number, line in enumerate((PROJECT / page).read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if language is None:
                language, begin, held = line[3:].strip(), number + 1, []
            else:
                found.append(Block(page, begin, language, "\n".join(held)))
                language = None
        elif language is not None:
            held.append(line)
    assert language is None, f"{page}: the block from line {begin} is not closed"
    return found


def of_language(language: str, pages: list[str] = PAGES) -> list[Block]:
    return [block for page in pages for block in blocks(page) if block.language == language]


COMMANDS = [(block, line.split("#")[0].strip()) for block in of_language("bash") for line in block.text.splitlines() if line.strip()]


def test_pages_have_examples():
    """Guards the tests below against finding nothing."""
    assert len(of_language("python")) >= 4 and len(of_language("yaml")) >= 3 and len(COMMANDS) >= 12
    assert {block.language for page in PAGES for block in blocks(page)} <= {"python", "yaml", "bash", ""}


@pytest.fixture
def routers():
    """What an example registers is gone afterwards."""
    with patch.dict(heuristics.ROUTERS):
        yield


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_runs(page, tmp_path, monkeypatch, routers):
    """The blocks of one page share one namespace, in order; each is compiled under its own place, so that an error names it."""
    monkeypatch.chdir(tmp_path)
    module = sys.modules[__name__]
    namespace: dict[str, object] = {"__name__": "docs_example"}
    monkeypatch.setitem(sys.modules, "docs_example", module)  # dataclasses look their module up
    for block in of_language("python", [page]):
        exec(compile("\n" * (block.line - 1) + block.text, block.name, "exec"), namespace)


def test_added_router_chooses_and_added_format_reads(tmp_path, monkeypatch, routers):
    """The two pieces of code in extending.md do what the page says of them."""
    from envs.traces import READERS, load_trace

    namespace: dict[str, object] = {"__name__": "docs_example"}
    monkeypatch.setitem(sys.modules, "docs_example", sys.modules[__name__])
    for block in of_language("python", ["docs/extending.md"]):
        exec(compile(block.text, block.name, "exec"), namespace)
    sys.path.insert(0, str(PROJECT / "tests" / "agents" / "heuristics"))
    try:
        points = importlib.import_module("decision_points")
    finally:
        sys.path.pop(0)
    view = points.view_of(3, prefill_backlog_tokens=[4000, 3000, 900], capability=[2.0, 1.0, 0.4])
    router = heuristics.make("route", "least_backlog", None)
    assert router.choose(points.route_point(view)) == 0, "4,000 / 2 against 3,000 / 1 and 900 / .4 = 2,250"
    assert router.choose(points.route_point(view, [False, True, True])) == 2
    monkeypatch.setitem(READERS, "gateway", namespace["READER"])
    (tmp_path / "log.csv").write_text("t_ms,tokens_in,tokens_out\n1500,30,4\n2750,31,5\n")
    table = load_trace(tmp_path / "log.csv")
    assert table.arrival_s.tolist() == [1.5, 2.75] and table.prompt_tokens.tolist() == [30, 31]


@pytest.mark.parametrize("block", of_language("yaml"), ids=lambda block: block.name)
def test_yaml_loads(block, tmp_path):
    """The first line says what it is: an experiment, a cluster or a service."""
    path = tmp_path / "mine.yaml"
    path.write_text(block.text, encoding="utf-8")
    kind = block.text.splitlines()[0]
    if kind == "# experiment":
        assert load_experiment(str(path)).name == "mine"
    elif kind == "# cluster":
        assert load_cluster(path).groups
    elif kind == "# service":
        assert load_service(path).groups
    else:
        pytest.fail(f"{block.name}: begin the block with '# experiment', '# cluster' or '# service'")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the files that the examples name."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "requests.csv").write_text(REQUESTS_CSV)
    (folder / "my-cluster.yaml").write_text((PROJECT / "envs/scenario/clusters/unlike-3.yaml").read_text())
    (folder / "my.yaml").write_text("name: mine\n")
    return folder


@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=lambda value: value.name if isinstance(value, Block) else value[:60])
def test_command_is_right(block, command, workplace, monkeypatch):
    """Cheap commands end with 0; expensive ones are accepted by their own parser, experiment and baselines included."""
    monkeypatch.chdir(workplace)
    words = shlex.split(command)
    if words[0] == "make":
        check_make(words[1:])
    elif words[0] == "tensorboard":
        assert words[1] == "--logdir" and len(words) == 3
    elif words[:2] == ["python", "train.py"]:
        check_train(words[2:])
    else:
        assert words[:2] == ["python", "-m"], f"{block.name}: no rule for {command!r}"
        check_module(words[2], words[3:], workplace)


def check_make(words: list[str]) -> None:
    makefile = (PROJECT / "Makefile").read_text()
    for word in words:
        name, separator, value = word.partition("=")
        if separator:
            assert re.search(rf"^{name} \?=", makefile, re.M), f"the Makefile has no variable {name}"
            if name == "TRAIN_FLAGS":
                check_train(shlex.split(value))
        else:
            assert re.search(rf"^{name}:", makefile, re.M), f"the Makefile has no target {name}"


def check_train(words: list[str]) -> None:
    from train import parse

    load_experiment(parse(words).experiment)


def check_module(module: str, words: list[str], workplace: Path) -> None:
    if f"{module} {' '.join(words)}".startswith(CHEAP):
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        found = subprocess.run(
            [sys.executable, "-m", module, *words], cwd=workplace, env=environment, capture_output=True, text=True, timeout=120
        )
        assert found.returncode == 0, found.stderr
    elif module == "agents.evaluate":
        check_evaluate(words)
    elif module == "agents.results":
        from agents.results import parse

        parse(words)
    elif module in ("runtime", "runtime.torch_tp", "benchmarks.tp_engine"):
        main = module if module.startswith("benchmarks") else f"{module}.__main__"
        importlib.import_module(main).build_parser().parse_args(words)
    elif module in ("benchmarks.service", "benchmarks.drill", "benchmarks.overload"):
        importlib.import_module(module).parse(words)
    elif module == "pytest":
        assert all((PROJECT / word).exists() for word in words if not word.startswith("-"))
    elif module == "agents.inspect_bundle":
        assert len(words) == 1
    else:
        assert importlib.util.find_spec(module) is not None and not words


def check_evaluate(words: list[str]) -> None:
    from agents.evaluate import BUNDLE_KINDS, pairs_of, parse, with_heuristics

    options = parse(words)
    pairs_of(options.bundle, "--bundle", BUNDLE_KINDS)
    chosen = [text for text in options.heuristic if text != "route=least_backlog"]  # the page's own example of an added one
    with_heuristics(load_experiment(options.experiment), chosen, options.all_heuristics)


PATH = re.compile(r"`((?:envs|agents|docs|tests|calibration|benchmarks|replay_logs|runtime)/[\w./-]*|[\w-]+\.(?:py|md))`")
MADE_LATER = {"replay_logs/cache/"}
"""Folders that a command makes."""


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page):
    """Paths in backticks; a bare file name stands for one that exists in a folder named on the same page."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    folders = ("agents", "docs", "envs", "runtime", "tests", "calibration")
    known = {path.name for folder in folders for path in (PROJECT / folder).rglob("*.*")}
    missing = [
        path for path in PATH.findall(text) if path not in MADE_LATER and not (PROJECT / path).exists() and Path(path).name not in known
    ]
    assert not missing, f"{page} names what does not exist: {missing}"


def test_names_in_the_readme_are_real():
    """Clusters of the results table, and traces, are ones that load."""
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    for cluster in set(re.findall(r"mixed-\d+b?", text)):
        load_cluster(cluster)
    from envs.traces.default_traces import FILES

    assert all(f"`{name}`" in text for name in FILES)
