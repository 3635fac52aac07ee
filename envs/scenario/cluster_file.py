"""Reads a cluster file, or one of the ready clusters by name, into a ClusterSpec; every refusal is one line.

The file's rows are described in `entries.py` and docs/clusters.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from envs.domain.plans import RankPlace, TpGroup
from envs.domain.specs import GpuSpec, LinkSpec, ModelSpec
from envs.domain.suggestions import unknown_name
from envs.perf_model.coefficients import profile
from envs.scenario import catalogue, group_check
from envs.scenario.cluster_spec import ClusterLimits, ClusterSpec, ScriptedFault
from envs.scenario.entries import ClusterEntry, FaultEntry, GroupEntry, LimitsEntry, RankEntry
from envs.scenario.scenario_error import ScenarioError, shown
from envs.scenario.validation import validate
from envs.scenario.yaml_text import read_yaml

FOLDER = Path(__file__).parent / "clusters"
DEFAULT_OUTER_LINK = "ethernet-25g"
DEFAULT_CONTEXT_TOKENS = 8192
GPUS_MAX = 4096
NODE_GPUS_USUAL = 8

_PLACEHOLDER = re.compile(r"\{i(?:(//|%)([1-9][0-9]{0,3}))?\}")


def ready_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with the project."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def cluster_path(path_or_name: str | Path) -> Path:
    """The file meant by a path or a ready cluster's name. Raises: ScenarioError for an unknown name."""
    if isinstance(path_or_name, str) and not re.search(r"[/\\]|\.ya?ml$", path_or_name):
        if path_or_name in ready_clusters():
            return FOLDER / f"{path_or_name}.yaml"
        if "\0" in path_or_name or not os.path.exists(path_or_name):  # which says no to a name that is too long, where Path raises
            raise ScenarioError(unknown_name("cluster", path_or_name, ready_clusters()) + "; or give a path ending in .yaml")
    return Path(path_or_name)


def load_cluster(path_or_name: str | Path) -> ClusterSpec:
    """Read a cluster file, or the ready cluster of that name.

    Raises: ScenarioError (a ValueError), one line naming file, key path, value and what to do.
    """
    path = cluster_path(path_or_name)
    return cluster_from_entry(validate(ClusterEntry, read_yaml(path), path), str(path))


def cluster_from_entry(entry: ClusterEntry, source: str) -> ClusterSpec:
    """Turn a validated file into domain values. `source` stands in front of every complaint."""
    try:
        known = _Known.of(entry, Path(source).parent)
        model = known.model(entry)
        groups, parked = _groups(entry, known, model)
        limits = _limits(entry.limits, model)
        _check(entry, groups, limits)
        faults = tuple(_fault(f"faults[{index}]", fault, groups) for index, fault in enumerate(entry.faults))
        return ClusterSpec(entry.name, model, groups, parked, limits, faults, entry.description)
    except ValueError as error:  # domain values refuse with one line of their own
        raise ScenarioError(f"{source}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Known:
    """The catalogues with a file's own rows and prices laid over them."""

    gpus: Mapping[str, GpuSpec]
    links: Mapping[str, LinkSpec]
    models: Mapping[str, ModelSpec]

    @classmethod
    def of(cls, entry: ClusterEntry, folder: Path) -> _Known:
        gpus = {**catalogue.load_gpus(), **{row.name: _own_gpu(row.to_spec(), folder) for row in entry.own_gpus}}
        links = {**catalogue.load_links(), **{row.name: row.to_spec() for row in entry.own_links}}
        models = {**catalogue.load_models(), **{row.name: row.to_spec() for row in entry.own_models}}
        for index, row in enumerate(entry.own_gpus):
            _lookup(f"own_gpus[{index}].link", "link", row.link, links)
        for name, usd_per_hour in entry.prices.items():
            spec = _lookup("prices", "GPU", name, gpus)
            if usd_per_hour < 0:
                raise ScenarioError(f"prices.{name}: {usd_per_hour} is negative; give US dollars per GPU and hour")
            gpus[name] = replace(spec, usd_per_hour=usd_per_hour)
        return cls(gpus, links, models)

    def model(self, entry: ClusterEntry) -> ModelSpec:
        choice = entry.model
        spec = _lookup("model.name", "model", choice.name, self.models)
        for key, dtype in (("weight_dtype", choice.weight_dtype), ("kv_dtype", choice.kv_dtype)):
            try:
                spec = catalogue.with_dtypes(spec, **{"weight_dtype": None, "kv_dtype": None, key: dtype})
            except ScenarioError as error:
                raise ScenarioError(f"model.{key}: {error}") from error
        return spec


def _own_gpu(spec: GpuSpec, folder: Path) -> GpuSpec:
    """With its own kernel profile's file, where it names one, found from the cluster file's folder, and read once as a check."""
    path, mark, name = spec.kernel_profile.rpartition("#")
    if not mark:
        return spec
    own = replace(spec, kernel_profile=f"{(folder / path).resolve()}#{name}")
    profile(own.kernel_profile)
    return own


def _groups(entry: ClusterEntry, known: _Known, model: ModelSpec) -> tuple[tuple[TpGroup, ...], tuple[bool, ...]]:
    groups: list[TpGroup] = []
    parked: list[bool] = []
    for index, row in enumerate(entry.groups):
        where = f"groups[{index}]"
        # before any rank is built, so that a huge count costs nothing
        devices = (row.count or 1) * sum(rank.count for rank in row.ranks)
        if devices + sum(len(group.ranks) for group in groups) > GPUS_MAX:
            raise ScenarioError(f"{where}: brings the cluster to more than {GPUS_MAX} GPUs; lower `count`")
        for replica in range(row.count or 1):
            groups.append(_group(where, row, replica, known, model))
            parked.append(row.parked)
    return tuple(groups), tuple(parked)


def _group(where: str, row: GroupEntry, replica: int, known: _Known, model: ModelSpec) -> TpGroup:
    if problem := group_check.degree_problem(model, sum(rank.count for rank in row.ranks)):
        raise ScenarioError(f"{where} ({row.name}): {problem}")
    ranks: list[RankPlace] = []
    for index, rank in enumerate(row.ranks):
        ranks += [_rank(f"{where}.ranks[{index}]", rank, replica, row.count, known)] * rank.count
    name = row.name if row.count is None else f"{row.name}-{replica}"
    outer = _lookup(f"{where}.outer_link", "link", row.outer_link or DEFAULT_OUTER_LINK, known.links)
    inner = _inner_link(where, row, ranks, known)
    group = TpGroup(name, model, tuple(ranks), inner, outer, row.host_speed)
    if len(group.domains) > 1 and row.outer_link is None:
        raise ScenarioError(f"{where}.outer_link: missing; the group spans {len(group.domains)} nodes, name their link")
    return group


def _inner_link(where: str, row: GroupEntry, ranks: list[RankPlace], known: _Known) -> LinkSpec:
    """The named link, or else the slowest that the group's GPUs have of their own: every rank waits for it."""
    if row.inner_link is not None:
        return _lookup(f"{where}.inner_link", "link", row.inner_link, known.links)
    own = [known.links[place.gpu.link] for place in ranks]
    return max(own, key=lambda link: link.beta_s_per_byte)


def _rank(where: str, rank: RankEntry, replica: int, count: int | None, known: _Known) -> RankPlace:
    gpu = _lookup(f"{where}.gpu", "GPU", rank.gpu, known.gpus)
    if (count or 1) > 1 and "{" not in rank.node and (count or 1) * rank.count > NODE_GPUS_USUAL:
        raise ScenarioError(
            f"{where}.node: {shown(rank.node)} would put all {count} replicas on one node; write e.g. {rank.node}-{{i}}, "
            f"or {rank.node}-{{i//2}} for two per node"
        )
    places = {key: _filled(f"{where}.{key}", getattr(rank, key), replica) for key in ("node", "switch", "rack")}
    return RankPlace(gpu, **places)


def _filled(where: str, text: str, replica: int) -> str:
    """`text` with `{i}`, `{i//N}` and `{i%N}` replaced by the replica's number, divided, or its remainder."""

    def value(match: re.Match[str]) -> str:
        sign, operand = match.groups()
        number = {None: replica, "//": replica // int(operand or 1), "%": replica % int(operand or 1)}[sign]
        return str(number)

    filled = _PLACEHOLDER.sub(value, text)
    if "{" in filled or "}" in filled:
        raise ScenarioError(f"{where}: {shown(text)} has a placeholder other than {{i}}, {{i//N}}, {{i%N}}; use one of these")
    return filled


def _limits(row: LimitsEntry, model: ModelSpec) -> ClusterLimits:
    context_tokens = row.context_tokens
    if context_tokens is None:
        context_tokens = min(DEFAULT_CONTEXT_TOKENS, model.context_tokens)
    if context_tokens > model.context_tokens:
        raise ScenarioError(f"limits.context_tokens: {context_tokens} is beyond the {model.context_tokens} of {model.name!r}; lower it")
    return ClusterLimits(row.max_running, row.queue_limit, row.hold_limit, row.kv_block_tokens, context_tokens, row.kv_blocks)


def _check(entry: ClusterEntry, groups: tuple[TpGroup, ...], limits: ClusterLimits) -> None:
    """Refuse what no plan could make work."""
    if problem := group_check.place_problem(groups):
        raise ScenarioError(f"groups: {problem}")
    origin = (index for index, row in enumerate(entry.groups) for _ in range(row.count or 1))
    for index, group in zip(origin, groups, strict=True):
        if problem := group_check.memory_problem(group, limits.kv_block_tokens):
            raise ScenarioError(f"groups[{index}] ({group.name}): {problem}")


def _fault(where: str, row: FaultEntry, groups: tuple[TpGroup, ...]) -> ScriptedFault:
    index_of = {group.name: index for index, group in enumerate(groups)}
    index = _lookup(f"{where}.group", "group", row.group, index_of)
    ranks = len(groups[index].ranks)
    if row.rank is not None and row.rank >= ranks:
        raise ScenarioError(f"{where}.rank: {row.rank}, but group {row.group!r} has {ranks} rank(s); give 0 to {ranks - 1}")
    rank_index = -1 if row.rank is None else row.rank
    return ScriptedFault(row.kind, index, row.start_s, row.length_s, rank_index, row.size)


def _lookup(where: str, kind: str, name: str, known: Mapping[str, catalogue.Value]) -> catalogue.Value:
    try:
        return catalogue.find(kind, name, known)
    except ScenarioError as error:
        raise ScenarioError(f"{where}: {error}") from None
