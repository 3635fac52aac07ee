"""Known GPUs, models and links, read once from `catalogue/*.yaml`. Says where each figure came from; plans nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from envs.domain.specs import NUMBER_BYTES, GpuSpec, LinkSpec, ModelSpec
from envs.domain.suggestions import unknown_name
from envs.scenario.entries import GpuCatalogue, GpuEntry, LinkCatalogue, LinkEntry, ModelCatalogue, ModelEntry
from envs.scenario.scenario_error import ScenarioError
from envs.scenario.validation import validate
from envs.scenario.yaml_text import read_yaml

Value = TypeVar("Value")
Row = TypeVar("Row", GpuEntry, ModelEntry, LinkEntry)

FOLDER = Path(__file__).parent / "catalogue"


@cache
def gpu_entries() -> Mapping[str, GpuEntry]:
    """GPU rows by name, with source, price basis and what was checked."""
    path = FOLDER / "gpus.yaml"
    return _by_name(validate(GpuCatalogue, read_yaml(path), path).gpus, path)


@cache
def model_entries() -> Mapping[str, ModelEntry]:
    """Model rows by name, with source and published parameter count."""
    path = FOLDER / "models.yaml"
    return _by_name(validate(ModelCatalogue, read_yaml(path), path).models, path)


@cache
def link_entries() -> Mapping[str, LinkEntry]:
    """Link rows by name, with source."""
    path = FOLDER / "links.yaml"
    return _by_name(validate(LinkCatalogue, read_yaml(path), path).links, path)


@cache
def load_gpus() -> Mapping[str, GpuSpec]:
    """All GPU types by name; every one's `link` is a name in load_links()."""
    specs = {name: entry.to_spec() for name, entry in gpu_entries().items()}
    for spec in specs.values():
        if spec.link not in load_links():
            raise ScenarioError(f"{FOLDER / 'gpus.yaml'}: {spec.name}: " + unknown_name("link", spec.link, load_links()))
    return MappingProxyType(specs)


@cache
def load_models() -> Mapping[str, ModelSpec]:
    """All models by name, weights and KV in bf16."""
    return MappingProxyType({name: entry.to_spec() for name, entry in model_entries().items()})


@cache
def load_links() -> Mapping[str, LinkSpec]:
    """All kinds of link by name; latency and time per byte of one direction."""
    return MappingProxyType({name: entry.to_spec() for name, entry in link_entries().items()})


def gpu(name: str) -> GpuSpec:
    """The GPU type `name`. Raises: ScenarioError with the nearest name and all known ones."""
    return find("GPU", name, load_gpus())


def link(name: str) -> LinkSpec:
    """The link `name`. Raises: ScenarioError with the nearest name and all known ones."""
    return find("link", name, load_links())


def model(name: str, weight_dtype: str | None = None, kv_dtype: str | None = None) -> ModelSpec:
    """The model `name` in the given number formats (bf16 by default). Raises: ScenarioError for an unknown name or format."""
    return with_dtypes(find("model", name, load_models()), weight_dtype, kv_dtype)


def with_dtypes(spec: ModelSpec, weight_dtype: str | None, kv_dtype: str | None) -> ModelSpec:
    """`spec` in other number formats; None keeps what it has. Raises: ScenarioError for an unknown format."""
    for dtype in (weight_dtype, kv_dtype):
        if dtype is not None and dtype not in NUMBER_BYTES:
            raise ScenarioError(unknown_name("dtype", dtype, NUMBER_BYTES))
    return replace(spec, weight_dtype=weight_dtype or spec.weight_dtype, kv_dtype=kv_dtype or spec.kv_dtype)


def find(kind: str, name: str, known: Mapping[str, Value]) -> Value:
    """`known[name]`. Raises: ScenarioError with the nearest name and all known ones."""
    try:
        return known[name]
    except KeyError:
        raise ScenarioError(unknown_name(kind, name, known)) from None


def _by_name(rows: list[Row], path: Path) -> Mapping[str, Row]:
    by_name = {row.name: row for row in rows}
    if len(by_name) < len(rows):
        twice = sorted({row.name for row in rows if sum(other.name == row.name for other in rows) > 1})
        raise ScenarioError(f"{path}: {', '.join(twice)} given twice; keep one row each")
    return MappingProxyType(by_name)
