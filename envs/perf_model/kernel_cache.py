"""Compiled code on disk that is never older than what it was made from.

numba keeps a compiled function by its own source file alone: where one in another file that it calls, or a constant from there, has
changed (a `git pull`), it would go on running what it once inlined. Here the key is the file with all of the project that it imports.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

PROJECT = Path(__file__).resolve().parents[2]
_IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+import\s+(\([^)]*\)|[^\n]*)|import\s+([\w.]+))", re.MULTILINE)


@cache
def _read(file: Path, project: Path) -> tuple[str, tuple[Path, ...]]:
    """A source's digest, and the files of the project that it imports, wherever in it that stands."""
    text = file.read_text(encoding="utf-8")
    imported = []
    for package, names, module in _IMPORT.findall(text):
        place = project.joinpath(*(package or module).split("."))
        places = (place, *(place / name for name in re.findall(r"\w+", names)))
        imported += [named for path in places if (named := path.with_suffix(".py")).is_file()]
    return hashlib.sha256(text.encode()).hexdigest(), tuple(imported)


@cache
def source_stamp(file: Path, project: Path) -> str:
    """Of the source of `file` and of all modules of the project that it imports, directly or through others."""
    digests: dict[Path, str] = {}
    waiting = [file]
    while waiting:
        if (path := waiting.pop()) not in digests:
            digests[path], imported = _read(path, project)
            waiting.extend(imported)
    return hashlib.sha256("".join(digests[path] for path in sorted(digests)).encode()).hexdigest()


class _ByImports:
    _py_file: str

    def get_source_stamp(self) -> Any:
        file = Path(self._py_file).resolve()
        return source_stamp(file, PROJECT) if file.is_relative_to(PROJECT) else super().get_source_stamp()  # type: ignore[misc]


class Chosen(_ByImports, caching.UserProvidedCacheLocator):
    """In $NUMBA_CACHE_DIR, where that is set."""


class InTree(_ByImports, caching.InTreeCacheLocator):
    """In `__pycache__` beside the source, where that can be written."""


class UserWide(_ByImports, caching.UserWideCacheLocator):
    """In the user's cache folder."""


numba.config.CACHE_LOCATOR_CLASSES = ",".join(f"{__name__}.{kind.__name__}" for kind in (Chosen, InTree, UserWide))  # type: ignore[attr-defined]  # read from the environment


def cached_njit(signature: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with its result kept on disk: the only way to keep compiled code here (a test sees to that)."""
    decorate: Callable[[Callable[..., Any]], Any] = numba.njit(signature, cache=True, **options)
    return decorate
