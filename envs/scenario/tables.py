"""Plain-text tables of catalogues and clusters, for `python -m envs.scenario`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from envs.domain.plans import RankPlace, TpGroup
from envs.domain.specs import LinkSpec
from envs.domain.units import GB, GIB, TFLOP, US
from envs.scenario import catalogue, group_check
from envs.scenario.cluster_spec import ClusterSpec

Row = Sequence[str]


def table(head: Row, rows: Sequence[Row]) -> str:
    """Left-aligned columns, two spaces apart, a rule under the head."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    rule = ["-" * width for width in widths]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, rule, *rows))
    return "\n".join(line.rstrip() for line in lines)


def gpu_table() -> str:
    rows = [
        (
            entry.name, f"{entry.tflop_per_s:.0f}", f"{entry.memory_gib:.0f}", f"{entry.memory_gb_per_s:.0f}",
            f"{entry.tdp_w:.0f}", entry.link, entry.kernel_profile, price(entry.usd_per_hour), yes(entry.checked), entry.source,
        )
        for entry in catalogue.gpu_entries().values()
    ]  # fmt: skip
    return table(("GPU", "TFLOP/s", "GiB", "GB/s", "W", "link", "profile", "$/h", "checked", "source"), rows)


def model_table() -> str:
    rows = [
        (
            entry.name, str(entry.layers), str(entry.hidden), f"{entry.query_heads}/{entry.kv_heads}", str(entry.mlp_width),
            f"{entry.experts_active}/{entry.experts}" if entry.experts else "-", str(entry.vocabulary), str(entry.context_tokens),
            f"{catalogue.model(entry.name).weight_bytes / GB:.2f}", yes(entry.checked), entry.source,
        )
        for entry in catalogue.model_entries().values()
    ]  # fmt: skip
    head = ("model", "layers", "hidden", "heads q/kv", "mlp", "experts", "vocab", "context", "GB in bf16", "checked", "source")
    return table(head, rows)


def link_table() -> str:
    rows = [
        (entry.name, f"{entry.latency_us:g}", f"{entry.gb_per_s:g}", yes(entry.checked), entry.source)
        for entry in catalogue.link_entries().values()
    ]
    return table(("link", "us", "GB/s one way", "checked", "source"), rows)


def cluster_list(clusters: Sequence[ClusterSpec]) -> str:
    rows = [
        (spec.name, str(len(spec.groups)), str(sum(spec.parked)), str(spec.gpus), spec.model.name, spec.description) for spec in clusters
    ]
    return table(("cluster", "groups", "parked", "GPUs", "model", "what it is"), rows)


def cluster_table(spec: ClusterSpec) -> str:
    """One cluster: its model, limits, and a row per group."""
    model, limits = spec.model, spec.limits
    kv_blocks = "what memory leaves" if limits.kv_blocks is None else str(limits.kv_blocks)
    lines = [
        f"{spec.name}: {spec.description}" if spec.description else spec.name,
        f"model   {model.name}, weights {model.weight_dtype} {model.weight_bytes / GB:.2f} GB, KV {model.kv_dtype} "
        f"{model.kv_bytes_per_token / 1024:.0f} KiB per token",
        f"limits  running {limits.max_running}, queue {limits.queue_limit}, hold {limits.hold_limit}, context "
        f"{limits.context_tokens} tokens, KV blocks of {limits.kv_block_tokens} tokens: {kv_blocks}",
        f"price   {spec.usd_per_hour:.2f} $/h without parked groups{_unpriced(spec)}",
        "",
        table(
            ("group", "ranks", "places", "inner link", "outer link", "memory GiB", "room GB", "TFLOP/s", "GB/s", "state"),
            [_group_row(group, parked) for group, parked in zip(spec.groups, spec.parked, strict=True)],
        ),
        "",
        "room: usable memory less weights, before workspace; what is left for KV at best.",
    ]
    faults = [
        (fault.kind, spec.groups[fault.group_index].name, "all" if fault.rank_index < 0 else str(fault.rank_index),
         f"{fault.start_s:g}", f"{fault.length_s:g}", f"{fault.size:g}")
        for fault in spec.faults
    ]  # fmt: skip
    if faults:
        lines += ["", table(("fault", "group", "rank", "start s", "length s", "size"), faults)]
    return "\n".join(lines)


def price(usd_per_hour: float) -> str:
    return f"{usd_per_hour:.2f}" if usd_per_hour > 0 else "unknown"


def yes(value: bool) -> str:
    return "yes" if value else "no"


def _unpriced(spec: ClusterSpec) -> str:
    names = sorted({place.gpu.name for group in spec.groups for place in group.ranks if place.gpu.usd_per_hour == 0})
    return f"; price unknown, counted as 0: {', '.join(names)}" if names else ""


def _group_row(group: TpGroup, parked: bool) -> Row:
    memory_bytes = sum(place.gpu.memory_bytes for place in group.ranks)
    room_bytes = group_check.USABLE_FRACTION * memory_bytes - group.model.weight_bytes
    kinds = [f"{len(list(run))}x{name}" for name, run in groupby(place.gpu.name for place in group.ranks)]
    places = dict.fromkeys(_place(place) for place in group.ranks)
    return (
        group.name,
        " + ".join(kinds),
        ", ".join(places),
        _link(group.inner_link) if len(group.ranks) > len(group.domains) else "-",
        _link(group.outer_link),
        f"{memory_bytes / GIB:.0f}",
        f"{room_bytes / GB:.1f}",
        f"{sum(place.gpu.flop_per_s for place in group.ranks) / TFLOP:.0f}",
        f"{sum(place.gpu.memory_bytes_per_s for place in group.ranks) / GB:.0f}",
        "parked" if parked else "on",
    )


def _place(place: RankPlace) -> str:
    return "/".join(part for part in (place.rack, place.node) if part)


def _link(link: LinkSpec) -> str:
    return f"{link.name} ({link.alpha_s / US:.1f} us, {1 / link.beta_s_per_byte / GB:.0f} GB/s)"
