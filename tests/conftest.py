"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
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
