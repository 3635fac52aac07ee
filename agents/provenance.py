"""Where a result came from: commit, configuration, seed, package versions. No machine names, no paths."""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "numba", "simpy", "gymnasium", "stable-baselines3", "sb3-contrib", "torch")


def provenance(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """Strict-JSON description of this run."""
    return {
        "commit": _commit(),
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "seed": seed,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def command_line(program: str, flags: Mapping[str, object]) -> str:
    """`program --flag value ...` for publication: flags that are None or False are left out, lists repeat their flag, and of an
    absolute path, alone or behind `KIND=`, only the last part stands: the rest is the machine's own."""
    words = program.split()
    for flag, value in flags.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if item is True:
                words.append(flag)
            elif item is not None and item is not False:
                words += [flag, _without_folder(str(item))]
    return shlex.join(words)


def _without_folder(text: str) -> str:
    kind, separator, path = text.rpartition("=")
    return f"{kind}{separator}{Path(path).name if Path(path).is_absolute() else path}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout this module lies in, with "+changes" when files differ from it; None outside one."""
    root = Path(__file__).resolve().parent.parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=5, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
