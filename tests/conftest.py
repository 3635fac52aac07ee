"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).resolve().parents[1]
SLOWER = 10.0
"""What a promised limit in seconds is multiplied by where a test waits for it: tests share their cores, and machines differ. The
benchmarks hold the service to the limits themselves."""
GUARD_S = 120.0
"""For waits that have a limit only so that a hang is told where it is."""
RERUN_UNDER = ("tests/runtime/", "tests/agents/test_ppo_training.py", "tests/test_train_cli.py")
OUTSIDE = frozenset({"asyncio", "http", "httpx", "multiprocessing", "signal", "socket", "subprocess", "threading"})
STARTERS = frozenset({"tests.runtime.live_service", "tests.runtime.scheduling.moving_service", "tests.runtime.torch_tp.rank_processes"})
RUNNING = frozenset({"nursery", "running"})
"""A test observes processes, threads, sockets or the clock where its module uses one of the first two, or it one of these fixtures."""
# pytest puts this folder on the path, where tests/envs would pass for the package envs when bare `pytest` is run;
# with the project on the path as well, the real package wins, since it has an __init__.py
sys.path.insert(0, str(PROJECT))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of measured data beside the project; tests that need it are skipped where it is absent."""
    stated = os.environ.get("BALLAST_SHARED")
    folder = Path(stated) if stated else PROJECT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no measured data at {folder}; set BALLAST_SHARED to the folder that holds it")
    return folder


@pytest.fixture(scope="session")
def kernels() -> None:
    """Compiled before the test begins: for tests with a time limit, or that start processes which would all compile."""
    from envs.cluster.warm_up import compile_kernels  # here, since most tests need no kernel

    compile_kernels()


def heed_interrupt() -> None:
    """`preexec_fn` of a child that a test interrupts: a suite started in the background passes an ignored SIGINT on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    config.option.rerun_show_tracebacks = True  # of a run that failed and was made good


@cache
def observes_processes(module: ModuleType) -> bool:
    used = {value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", "")) for value in vars(module).values()}
    return any(name.partition(".")[0] in OUTSIDE or name in STARTERS for name in used)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A failed test over real processes is run once more (`pytest -p no:rerunfailures`: none is)."""
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        assert isinstance(item, pytest.Function)
        where = item.path.relative_to(PROJECT).as_posix() if item.path.is_relative_to(PROJECT) else ""
        if where.startswith(RERUN_UNDER) and (RUNNING & set(item.fixturenames) or observes_processes(item.module)):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The second run gets its module's fixtures anew: the service that the first one struck may be what failed."""
    if getattr(item, "execution_count", 1) > 1:
        assert isinstance(item, pytest.Function)
        for found in item._fixtureinfo.name2fixturedefs.values():
            for fixture in found:
                if fixture.scope == "module":
                    fixture.finish(item._request)
