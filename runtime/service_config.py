"""The service's configuration: one YAML file, validated, and its way into settings. Every key has a default and one line of meaning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from envs.decision.actions import Decision
from envs.domain.suggestions import unknown_name
from envs.scenario.cluster_file import load_cluster
from envs.scenario.cluster_spec import ClusterSpec
from envs.scenario.scenario_error import ScenarioError, shown
from envs.scenario.validation import validate
from envs.scenario.yaml_text import FileKind, read_yaml
from runtime.gateway.settings import GatewaySettings
from runtime.gateway.smaller_model import SmallerModelSettings
from runtime.records.settings import RecordEntry
from runtime.rollout.settings import RolloutEntry
from runtime.scheduling.control_settings import ControlSettings
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.setting_bounds import DEVICE
from runtime.tracing.tracer import DEFAULT_ENDPOINT, TracingSettings

PORT_MAX = 65_535
SERVICE_FILE = FileKind(
    "give the path of a service file (docs/service.md)", "runtime/demonstration/service.yaml is an example", "cluster, groups, scheduler"
)


class Entry(BaseModel):
    """Base of all rows: a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`yes` and `true` would pass for 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in (int, float):
            raise ValueError(f"{str(value).lower()} is no number")
        return value


class RankEntry(Entry):
    """One rank of a torch_tp group. speed: relative, until measured. slow_factor: EMULATION of a device so many times slower."""

    device: str = Field(default="cpu", pattern=f"^({DEVICE})$")
    speed: float = Field(default=1.0, gt=0)
    slow_factor: float = Field(default=1.0, ge=1)
    threads: int = Field(default=1, ge=1, le=256)


class GroupEntry(Entry):
    """What serves one group of the cluster file. ranks: of torch_tp, one per rank of the cluster file (default: all alike). url: of
    openai_http, up to but without /v1. remote_model: the model's name there. api_key_env: environment variable with the key for it."""

    kind: Literal["emulated", "torch_tp", "openai_http"] = "emulated"
    ranks: list[RankEntry] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    url: str | None = None
    remote_model: str | None = None
    api_key_env: str | None = None


class ModelEntry(Entry):
    """name: by which callers ask for it (default: the cluster file's). path: directory, .gguf file or known name; torch_tp needs it."""

    name: str | None = Field(default=None, min_length=1, max_length=256)
    path: str | None = None


class SchedulerEntry(Entry):
    """deadline_ms: what the policy gets for a decision. outside_max: inputs that may lie outside the range seen in training. heuristic:
    answers where the policy does not. agreement_min, agreement_max: band of the share of decisions in which policy and heuristic agree;
    outside it the policy's breaker opens."""

    heuristic: str = "net_utility"
    deadline_ms: float = Field(default=5.0, gt=0, le=1000)
    outside_max: int = Field(default=0, ge=0)
    agreement_min: float = Field(default=0.02, ge=0, le=1)
    agreement_max: float = Field(default=1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _band(self) -> SchedulerEntry:
        if self.agreement_min > self.agreement_max:
            raise ValueError(f"agreement_min={self.agreement_min} is above agreement_max={self.agreement_max}")
        return self


class TracingEntry(Entry):
    """Present, even empty: requests are traced. endpoint: of an OTLP/HTTP collector. share: of requests without a caller's trace that are
    traced. timeout_s: what the collector gets for a batch."""

    endpoint: str = DEFAULT_ENDPOINT
    share: float = Field(default=1.0, ge=0, le=1)
    timeout_s: float = Field(default=5.0, gt=0, le=60)


class SmallerModelEntry(Entry):
    """Fields of SmallerModelSettings, by which they are explained. api_key_env: environment variable with the key for that server."""

    url: str
    model: str = Field(min_length=1, max_length=256)
    classes: list[str] = ["chat", "batch"]
    api_key_env: str | None = None
    max_in_flight: int = Field(default=32, ge=1, le=4096)
    first_byte_s: float = Field(default=10.0, gt=0, le=600)
    gap_s: float = Field(default=10.0, gt=0, le=600)
    answer_s: float = Field(default=60.0, gt=0, le=600)


class ServiceEntry(Entry):
    """A whole service file. cluster: file (beside this one) or ready cluster. groups: by the cluster file's names; those not named are
    emulated. dispatch, control, gateway: fields of DispatchSettings, ControlSettings and GatewaySettings. records: see RecordEntry.
    rollout: see RolloutEntry. api_keys_env: environment variable with keys, comma between. drain_s: what streams get to end after
    SIGTERM. tracing: none. smaller_model: none."""

    cluster: str | None = None
    bundle: str | None = None
    split_bundle: str | None = None
    rebalance_bundle: str | None = None
    model: ModelEntry = ModelEntry()
    groups: dict[str, GroupEntry] = Field(default_factory=dict)
    scheduler: SchedulerEntry = SchedulerEntry()
    dispatch: dict[str, Any] = Field(default_factory=dict)
    control: dict[str, Any] = Field(default_factory=dict)
    gateway: dict[str, Any] = Field(default_factory=dict)
    api_keys_env: str | None = None
    records: RecordEntry = RecordEntry()
    rollout: RolloutEntry = RolloutEntry()
    host: str = Field(default="127.0.0.1", min_length=1, max_length=253)
    port: int = Field(default=8000, ge=0, le=PORT_MAX)
    drain_s: int = Field(default=30, ge=0, le=3600)
    tracing: TracingEntry | None = None
    smaller_model: SmallerModelEntry | None = None


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """What is to be served; see `ServiceEntry`."""

    cluster: ClusterSpec
    bundle: str | None
    model_name: str
    model_path: str | None
    groups: tuple[GroupEntry, ...]
    scheduler: SchedulerEntry
    dispatch: DispatchSettings
    gateway: GatewaySettings
    records: RecordEntry
    rollout: RolloutEntry
    host: str
    port: int
    drain_s: int
    control: ControlSettings = field(default_factory=ControlSettings)
    split_bundle: str | None = None
    rebalance_bundle: str | None = None
    tracing: TracingSettings | None = None
    smaller_model: SmallerModelSettings | None = None

    def bundle_of(self, decision: Decision) -> str | None:
        """Directory of the policy for a kind of decision; None where its heuristic decides."""
        return {"route": self.bundle, "split": self.split_bundle, "rebalance": self.rebalance_bundle}[decision]


def load_service(config: Path | None, cluster: str | None = None, bundle: str | None = None, **overrides: Any) -> ServiceConfig:
    """Read a service file (or none: all by default) and its cluster file; arguments stand above the file.

    Raises: ScenarioError (a ValueError), one line naming file, key and what to do.
    """
    entry = validate(ServiceEntry, read_yaml(config, SERVICE_FILE), config) if config is not None else ServiceEntry()
    source = str(config) if config is not None else "service"
    found = cluster or _beside(config, entry.cluster)
    if found is None:
        raise ScenarioError(f"{source}: cluster: missing; give --cluster FILE, or the key `cluster` in the service file")
    spec = load_cluster(found)
    groups = _groups(source, entry, spec)
    if any(group.kind == "torch_tp" for group in groups) and entry.model.path is None:
        raise ScenarioError(f"{source}: model.path: missing; groups of kind torch_tp need a model directory, .gguf file or known name")
    dispatch = _settings(source, "dispatch", DispatchSettings, {"heuristic": entry.scheduler.heuristic} | entry.dispatch)
    keys = tuple(key for key in os.environ.get(entry.api_keys_env or "", "").split(",") if key)
    if entry.api_keys_env is not None and not keys:
        raise ScenarioError(f"{source}: api_keys_env: the environment has no {shown(entry.api_keys_env)}")
    gateway = _settings(source, "gateway", GatewaySettings, {"api_keys": keys} | entry.gateway)
    port = entry.port if overrides.get("port") is None else overrides["port"]
    if not 0 <= port <= PORT_MAX:
        raise ScenarioError(f"{source}: port: {port} must be within 0 to {PORT_MAX}")
    records = entry.records.model_copy(update={"dir": overrides.get("record_dir") or _folder(config, entry.records.dir)})
    in_place = {"dir": _folder(config, entry.rollout.dir), "evidence_key_file": _folder(config, entry.rollout.evidence_key_file)}
    rollout = entry.rollout.model_copy(update=in_place)
    return ServiceConfig(
        spec, bundle or _beside(config, entry.bundle), entry.model.name or spec.model.name, _model_path(config, entry.model.path), groups,
        entry.scheduler, dispatch, gateway, records, rollout, overrides.get("host") or entry.host,
        port, entry.drain_s,
        _settings(source, "control", ControlSettings, entry.control),
        overrides.get("split_bundle") or _beside(config, entry.split_bundle),
        overrides.get("rebalance_bundle") or _beside(config, entry.rebalance_bundle),
        _tracing(source, entry.tracing),
        _smaller_model(source, entry.smaller_model),
    )  # fmt: skip


def _tracing(source: str, entry: TracingEntry | None) -> TracingSettings | None:
    if entry is None:
        return None
    try:
        return TracingSettings(entry.endpoint, entry.share, entry.timeout_s)
    except ValueError as error:
        raise ScenarioError(f"{source}: tracing: {error}") from error


def _smaller_model(source: str, entry: SmallerModelEntry | None) -> SmallerModelSettings | None:
    if entry is None:
        return None
    _check_url(f"{source}: smaller_model.url", entry.url)
    key = _key_in(f"{source}: smaller_model.api_key_env", entry.api_key_env) if entry.api_key_env is not None else ""
    given = entry.model_dump(exclude={"api_key_env", "classes"})
    try:
        return SmallerModelSettings(**given, classes=tuple(entry.classes), api_key=key)
    except ValueError as error:
        raise ScenarioError(f"{source}: smaller_model: {error}") from error


def _check_url(key: str, url: str | None) -> None:
    """Raises: ScenarioError for what is no address of an HTTP server."""
    text = url or ""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:  # a port that is no number
        is_good = False
    if not (is_good and text.isascii() and text.isprintable() and " " not in text):
        raise ScenarioError(f"{key}: {shown(url)} must begin with http:// or https://, then HOST or HOST:PORT")


def _beside(config: Path | None, name: str | None) -> str | None:
    """A path relative to the service file where there is such a file, else the name as it is."""
    if name is None or config is None:
        return name
    near = config.parent / name
    try:
        return str(near) if near.exists() else name
    except OSError as error:
        raise ScenarioError(f"{config}: {shown(name)}: {error.strerror}; give a path") from error


def _folder(config: Path | None, name: str | None) -> str | None:
    """A path that need not be there yet, relative to the service file's folder."""
    return name if name is None or config is None else str(config.parent / name)


def _model_path(config: Path | None, path: str | None) -> str | None:
    return _beside(config, path)


def _groups(source: str, entry: ServiceEntry, spec: ClusterSpec) -> tuple[GroupEntry, ...]:
    names = [group.name for group in spec.groups]
    for name in entry.groups:
        if name not in names:
            raise ScenarioError(f"{source}: groups: {unknown_name('group', name, names)}")
    groups = []
    for group in spec.groups:
        chosen = entry.groups.get(group.name, GroupEntry())
        count = len(group.ranks)
        if chosen.kind == "torch_tp":
            ranks = chosen.ranks or [RankEntry()] * count
            if len(ranks) != count:
                raise ScenarioError(f"{source}: groups.{group.name}.ranks: {len(ranks)} entries, the cluster file has {count} ranks")
            chosen = chosen.model_copy(update={"ranks": ranks})
        elif chosen.ranks is not None:
            raise ScenarioError(f"{source}: groups.{group.name}.ranks: only for kind torch_tp")
        where = f"{source}: groups.{group.name}"
        if chosen.kind == "openai_http":
            _check_url(f"{where}.url", chosen.url)
        for name in ("url", "remote_model", "api_key_env"):
            if chosen.kind != "openai_http" and getattr(chosen, name) is not None:
                raise ScenarioError(f"{where}.{name}: only for kind openai_http")
        if chosen.api_key_env is not None:
            _key_in(f"{where}.api_key_env", chosen.api_key_env)
        groups.append(chosen)
    return tuple(groups)


def _key_in(key: str, variable: str) -> str:
    """A server's key from the environment. Raises: ScenarioError without one, and for what would begin another header."""
    found = os.environ.get(variable, "")
    if not (found and found.isascii() and found.isprintable()):
        raise ScenarioError(f"{key}: the environment has no {shown(variable)} with a key of printable ASCII")
    return found


def _settings(source: str, key: str, kind: Any, given: Mapping[str, Any]) -> Any:
    """A settings dataclass from plain values. Raises: ScenarioError for an unknown name or a value that it refuses."""
    known = {field.name: field for field in fields(kind)}
    for name in given:
        if name not in known:
            raise ScenarioError(f"{source}: {key}: {unknown_name('setting', name, known)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    default = kind()
    for name, value in values.items():
        wanted = getattr(default, name)
        is_number = isinstance(wanted, int | float) and not isinstance(wanted, bool)
        of = (int,) if type(wanted) is int else (int, float) if is_number else (type(wanted),)
        if not isinstance(value, of) or (is_number and isinstance(value, bool)):
            called = "whole number" if type(wanted) is int else "number" if is_number else type(wanted).__name__
            raise ScenarioError(f"{source}: {key}.{name}: {shown(value)} must be a {called}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ScenarioError(f"{source}: {key}: {error}") from error
