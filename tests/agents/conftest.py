"""Fixtures of the agents' tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared cases; a test that needs it skips where it is absent."""
    path = Path(os.environ.get("BALLAST_SHARED", Path(__file__).parents[3] / "shared"))
    if not path.is_dir():
        pytest.skip(f"shared cases not found at {path}; set BALLAST_SHARED")
    return path
