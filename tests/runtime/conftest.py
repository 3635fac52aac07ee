"""Fixtures of tests that start real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.torch_tp.nursery import Nursery


@pytest.fixture(scope="session")
def dreams(shared: Path) -> Path:
    """The small trained checkpoint: 4 layers, 4 query and 4 KV heads, MLP 172, vocabulary 512."""
    folder = shared / "models" / "aidreams260k"
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    return folder


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Workers that start in a fraction of a second: torch is imported once for the whole run."""
    nursery = Nursery()
    nursery.start()
    yield nursery
    nursery.close()
