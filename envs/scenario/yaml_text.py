"""Reads one YAML file into plain dicts, lists and scalars, and refuses what a settings file has no need of.

Refused: files above a size, nesting above a depth, aliases (a small file can expand to billions of nodes), keys given
twice (the YAML reader would keep the last without a word), tags that build objects, text that nothing could be called by.
"""

from __future__ import annotations

import errno
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from envs.scenario.scenario_error import ScenarioError, shown

BYTES_MAX = 256 * 1024
DEPTH_MAX = 16
UNUSABLE = re.compile("[\\0\\ud800-\\udfff]")
"""No name, path or address can have these; escapes can write them."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses keys given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key_node.start_mark)
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {shown(key_node.value)} is given twice; keep one", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class FileKind:
    """What to tell somebody whose file is not there, is empty, or holds something else."""

    give: str
    start: str
    keys: str


CLUSTER_FILE = FileKind(
    "give the path of a cluster file or the name of a ready cluster",
    "`python -m envs.scenario show mixed-8 --yaml` prints one to start from",
    "name, model, groups",
)


def read_yaml(path: Path, kind: FileKind = CLUSTER_FILE) -> dict[str, Any]:
    """Return the mapping in `path`. Raises: ScenarioError for anything that is not one readable, bounded YAML mapping."""
    text = _read_text(path, kind)
    try:
        _check_events(path, text)
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}: {_yaml_problem(error)}; correct the YAML") from error
    except (RecursionError, ValueError) as error:
        if isinstance(error, ScenarioError):
            raise
        raise ScenarioError(f"{path}: not readable as YAML ({shown(str(error))}); correct the YAML") from error
    if content is None:
        raise ScenarioError(f"{path}: the file is empty; {kind.start}")
    if not isinstance(content, dict):
        raise ScenarioError(f"{path}: holds a {type(content).__name__}, expected a mapping of keys such as {kind.keys}")
    return content


def _read_text(path: Path, kind: FileKind) -> str:
    raw = _read_bytes(path, kind)
    if len(raw) > BYTES_MAX:
        raise ScenarioError(f"{path}: more than {BYTES_MAX} bytes; use `count` for repeated groups")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error


def _read_bytes(path: Path, kind: FileKind) -> bytes:
    """At most BYTES_MAX + 1 bytes of a plain file; a pipe or device could block for ever."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR, "is a folder" if stat.S_ISDIR(mode) else "is not a plain file")
        with path.open("rb") as file:
            return file.read(BYTES_MAX + 1)
    except OSError as error:
        reason = "no such file" if error.errno == errno.ENOENT else (error.strerror or str(error))
        raise ScenarioError(f"{path}: {reason}; {kind.give}") from error
    except ValueError as error:  # a NUL byte in the path
        raise ScenarioError(f"{shown(str(path))}: not a usable path ({error})") from error


def _check_events(path: Path, text: str) -> None:
    """Refuse aliases and deep nesting from the event stream, before any node is built."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            line = _line(event)
            raise ScenarioError(f"{path}: line {line}: alias *{shown(event.anchor)} is not allowed; write the value out")
        if isinstance(event, yaml.ScalarEvent) and UNUSABLE.search(event.value):
            raise ScenarioError(f"{path}: line {_line(event)}: {shown(event.value)} has a NUL or half a character; write text")
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
            if depth > DEPTH_MAX:
                line = _line(event)
                raise ScenarioError(f"{path}: line {line}: nested deeper than {DEPTH_MAX} levels; flatten it")
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 0


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).replace("\n", " ")
    context = f"{error.context}, " if isinstance(error, yaml.MarkedYAMLError) and error.context else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {context}{problem}" if mark is not None else problem
