"""Turns pydantic's refusal of a file's content into one line: file, place, value, what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from envs.domain.suggestions import unknown_name
from envs.scenario.scenario_error import ScenarioError, shown

EntryType = TypeVar("EntryType", bound=BaseModel)
Location = tuple[int | str, ...]


def validate(entry_type: type[EntryType], content: dict[str, Any], path: Path | str) -> EntryType:
    """Return `content` as `entry_type`. Raises: ScenarioError naming `path`, the key path and the value of the first fault."""
    try:
        return entry_type.model_validate(content)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ScenarioError(f"{path}: {_problem(entry_type, faults[0])}{more}") from error


def key_path(location: Location) -> str:
    """`("groups", 0, "ranks")` as `groups[0].ranks`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _problem(entry_type: type[BaseModel], fault: Any) -> str:
    location: Location = fault["loc"]
    if fault["type"] == "extra_forbidden":
        where = key_path(location[:-1])
        return (f"{where}: " if where else "") + unknown_name("key", str(location[-1]), keys_at(entry_type, location[:-1]))
    if fault["type"] == "missing":
        return f"{key_path(location)}: missing; add it"
    return f"{key_path(location)}: {shown(fault['input'])} refused, {fault['msg'][0].lower()}{fault['msg'][1:]}"


def keys_at(entry_type: type[BaseModel], location: Location) -> list[str]:
    """Keys of the row that `location` leads to."""
    for part in location:
        if isinstance(part, str) and part in entry_type.model_fields:
            annotation = entry_type.model_fields[part].annotation
            for candidate in (annotation, *get_args(annotation)):
                if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                    entry_type = candidate
    return list(entry_type.model_fields)
