"""Fits every kernel profile to the published timings and writes envs/perf_model/coefficients.json.

    python -m calibration.fit_coefficients --data ../shared/calibration --out envs/perf_model/coefficients.json

Stacks are not pooled: each family of a profile comes from one source, named in its `provenance`. The shipped numbers are
those fitted on two thirds of the rows; `held_out_error` is their error on the other third (seeded).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibration import measurements as M
from calibration.kernel_fits import AttentionFit, GemmFit, affine_s, fit_affine, fit_attention, fit_gemm, score, split_rows
from calibration.measurements import SOURCES, LayerGemms, Peaks, Timings
from calibration.step_fits import SPLITWISE_RANKS, EagerFit, HelixFit, HostFit, Kernels, fit_helix, fit_splitwise, fit_vllm_run
from envs.perf_model.coefficients import CONTEXT_KNOTS, SCHEMA_VERSION, parse_profiles

SEED = 20240611
SCRIPT = "calibration/fit_coefficients.py"
ALL_REDUCE_BYTES_MAX = 64 * 2**20
Errors = dict[str, dict[str, float]]
ReduceCosts = dict[int, tuple[float, float, float]]
CrossNode = tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Where each family of one directly measured profile comes from; None borrows from `stand_in`."""

    gpu: str
    gemms: Callable[[Path], LayerGemms]
    gemm_source: str
    elementwise: Callable[[Path], Timings] | None
    attention: Callable[[Path], tuple[Timings, Timings]] | None
    attention_source: str = ""
    all_reduce_gpu: str = ""
    all_reduce_link: str = ""
    splitwise: str = ""
    network: str = ""
    vllm_run: str = ""
    link_bandwidth: bool = False
    stand_in: str = ""


def _vidur(gpu: str) -> Callable[[Path], LayerGemms]:
    return lambda data: M.vidur_layer_gemms(data, gpu)


def _aic(gpu: str) -> Callable[[Path], tuple[Timings, Timings]]:
    return lambda data: M.aiconfigurator_attention(data, gpu)


MEASURED: dict[str, Measured] = {
    "rtx4090": Measured(
        "RTX4090", lambda d: M.llmservingsim_gemms(d, "RTX4090"), "llmservingsim",
        lambda d: M.llmservingsim_elementwise(d, "RTX4090"), lambda d: M.llmservingsim_attention(d, "RTX4090"),
        "llmservingsim", vllm_run="RTX4090", stand_in="l40s",
    ),
    "rtxpro6000": Measured(
        "RTXPRO6000-Server", lambda d: M.llmservingsim_gemms(d, "RTXPRO6000"), "llmservingsim",
        lambda d: M.llmservingsim_elementwise(d, "RTXPRO6000"), lambda d: M.llmservingsim_attention(d, "RTXPRO6000"),
        "llmservingsim", "rtx_pro_6000_server", "pcie5", vllm_run="RTXPRO6000",
    ),
    "a100": Measured(
        "A100-80G-SXM4", _vidur("a100"), "vidur", lambda d: M.vidur_elementwise(d, "a100"), _aic("a100_sxm"),
        "aiconfigurator", "a100_sxm", "nvlink3", "a100-80gb", "a100_dgx", stand_in="rtxpro6000",
    ),
    "h100": Measured(
        "H100-SXM5", _vidur("h100"), "vidur", lambda d: M.vidur_elementwise(d, "h100"), _aic("h100_sxm"),
        "aiconfigurator", "h100_sxm", "nvlink4", "h100-80gb", stand_in="rtxpro6000",
    ),
    "a40": Measured("A40", _vidur("a40"), "vidur", lambda d: M.vidur_elementwise(d, "a40"), None, stand_in="a100"),
    "b200": Measured(
        "B200-SXM", lambda d: M.aiconfigurator_gemms(d, "b200_sxm"), "aiconfigurator", None, _aic("b200_sxm"),
        "aiconfigurator", "b200_sxm", "nvlink5", stand_in="h100",
    ),
    # Its host reached 2.5 GB/s (no peer access), a fault of that host: latency is used, bandwidth is the declared link's.
    "l40s": Measured(
        "L40S", lambda d: M.aiconfigurator_gemms(d, "l40s"), "aiconfigurator", None, _aic("l40s"),
        "aiconfigurator", "l40s", "pcie4", link_bandwidth=True, stand_in="rtx4090",
    ),
}  # fmt: skip
HELIX_MACHINES = {"v100": ("V100-SXM2-16G", "v100"), "l4": ("L4", "l4"), "t4": ("T4", "t4")}
FIT_ORDER = ("rtxpro6000", "rtx4090", "a100", "h100", "a40", "b200", "l40s")
"""A profile comes after its stand-in; rtx4090 takes its all-reduce from l40s in a second pass."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Everything fitted for one profile, before it becomes JSON."""

    kernels: Kernels
    host: HostFit
    eager: EagerFit | None
    all_reduce: ReduceCosts
    errors: Errors
    provenance: dict[str, str]
    borrowed: dict[str, str]
    all_reduce_link: str = ""
    link_bandwidth: bool = False
    cross_node: CrossNode = ()


def _provenance(source: str, rows: int, what: str) -> str:
    return f"{SOURCES[source]}; {rows} rows; {what}; {SCRIPT}"


def _fit_gemms(gemms: LayerGemms, peaks: Peaks, rng: np.random.Generator) -> tuple[GemmFit, Errors]:
    fitted, held = split_rows(len(gemms.tokens), rng)
    fit = fit_gemm(gemms.rows(fitted), peaks, rng=rng)
    unseen = gemms.rows(held)
    total_s = unseen.measured_s.sum(axis=1)
    return fit, {
        "gemm": score(fit.layer_s(unseen, peaks), total_s),
        "gemm_plain": score(fit.layer_s(unseen, peaks, with_residual=False), total_s),
    }


def leave_one_model_out(gemms: LayerGemms, peaks: Peaks, rng: np.random.Generator) -> dict[str, float]:
    """Score of layer GEMM sums on models none of whose rows were fitted, each model in turn."""
    predicted, measured = [], []
    for model in sorted(set(gemms.unit)):
        fit = fit_gemm(gemms.rows(gemms.unit != model), peaks, rng=rng)
        unseen = gemms.rows(gemms.unit == model)
        predicted.append(fit.layer_s(unseen, peaks))
        measured.append(unseen.measured_s.sum(axis=1))
    return score(np.concatenate(predicted), np.concatenate(measured))


def _fit_attention_family(
    timings: Timings, peak: float, family: str, overhead_s: float | None, rng: np.random.Generator
) -> tuple[AttentionFit, Errors]:
    fitted, held = split_rows(len(timings), rng)
    fit = fit_attention(timings.rows(fitted), peak, overhead_s)
    unseen = timings.rows(held)
    return fit, {
        family: score(fit.time_s(unseen, peak), unseen.measured_s),
        f"{family}_plain": score(fit.time_s(unseen, peak, with_residual=False), unseen.measured_s),
    }


def _fit_affine_family(timings: Timings, rng: np.random.Generator) -> tuple[float, float, Timings]:
    fitted, held = split_rows(len(timings), rng)
    alpha_s, beta = fit_affine(timings.rows(fitted))
    return alpha_s, beta, timings.rows(held)


def fit_all_reduce(data: Path, gpu: str, rng: np.random.Generator) -> tuple[ReduceCosts, Errors, int]:
    """{ranks: (alpha_s, beta, eager alpha_s)} of vLLM's custom all-reduce up to 64 MiB, and the graph fit's error."""
    found: ReduceCosts = {}
    predicted, measured, rows = [], [], 0
    for ranks in (2, 4, 8):
        graph, eager = (M.aiconfigurator_all_reduce(data, gpu, ranks, backend) for backend in ("graph", "eager"))
        alpha_s, beta, unseen = _fit_affine_family(graph.rows(graph.work <= ALL_REDUCE_BYTES_MAX), rng)
        predicted.append(affine_s(alpha_s, beta)(unseen))
        measured.append(unseen.measured_s)
        rows += len(graph) + len(eager)
        small = eager.measured_s[eager.work <= 64 * 1024]
        found[ranks] = (alpha_s, beta, max(float(np.median(small)), alpha_s))
    return found, {"all_reduce": score(np.concatenate(predicted), np.concatenate(measured))}, rows


def fit_cross_node(data: Path, network: str, rng: np.random.Generator) -> tuple[CrossNode, Errors]:
    """Rows (ranks, ranks per node, alpha_s, beta) of NCCL across nodes, where Vidur measured it."""
    rows, predicted, measured = [], [], []
    for ranks, per_node in ((2, 1), (4, 2), (8, 4), (16, 8)):
        alpha_s, beta, unseen = _fit_affine_family(M.vidur_all_reduce(data, network, ranks, per_node), rng)
        rows.append((float(ranks), float(per_node), alpha_s, beta))
        predicted.append(affine_s(alpha_s, beta)(unseen))
        measured.append(unseen.measured_s)
    return tuple(rows), {"all_reduce_cross_node": score(np.concatenate(predicted), np.concatenate(measured))}


def fit_measured(name: str, data: Path, done: dict[str, Fitted], rng: np.random.Generator) -> Fitted:
    """Fit one profile of MEASURED; families without data are copied from its stand-in."""
    entry = MEASURED[name]
    peaks = M.peaks_of(data, entry.gpu)
    stand_in = done.get(entry.stand_in)
    borrowed: dict[str, str] = {}
    gemms = entry.gemms(data)
    gemm, errors = _fit_gemms(gemms, peaks, rng)
    provenance = {"gemm": _provenance(entry.gemm_source, len(gemms.tokens), entry.gpu)}
    if entry.gemm_source == "vidur":
        errors["gemm_unseen_model"] = leave_one_model_out(gemms, peaks, rng)
    if entry.attention is not None:
        prefill_rows, decode_rows = entry.attention(data)
        decode, found = _fit_attention_family(decode_rows, peaks.memory_bytes_per_s, "decode_attention", None, rng)
        prefill, found_prefill = _fit_attention_family(prefill_rows, peaks.flop_per_s, "prefill_attention", decode.overhead_s, rng)
        errors |= found | found_prefill
        provenance["attention"] = _provenance(entry.attention_source, len(prefill_rows) + len(decode_rows), entry.gpu)
    else:
        assert stand_in is not None
        prefill, decode = stand_in.kernels.prefill, stand_in.kernels.decode
        borrowed["attention"] = entry.stand_in
    if entry.elementwise is not None:
        alpha_s, beta, unseen = _fit_affine_family(entry.elementwise(data), rng)
        errors["elementwise"] = score(affine_s(alpha_s, beta)(unseen), unseen.measured_s)
        elementwise = (alpha_s, beta)
        provenance["elementwise"] = _provenance(entry.gemm_source, len(unseen) * 3, entry.gpu)
    else:
        elementwise = _scaled_elementwise(done[entry.stand_in].kernels, peaks)
        borrowed["elementwise"] = f"{entry.stand_in}, scaled by memory bandwidth"
    kernels = Kernels(peaks, gemm, prefill, decode, elementwise, {})
    return _with_collectives_and_step(name, data, done, rng, Fitted(kernels, _NO_HOST, None, {}, errors, provenance, borrowed))


_NO_HOST = HostFit(0.0, 0.0, {})


def _scaled_elementwise(source: Kernels, peaks: Peaks) -> tuple[float, float]:
    alpha_s, beta = source.elementwise
    return alpha_s, beta * source.peaks.memory_bytes_per_s / peaks.memory_bytes_per_s


def _with_collectives_and_step(name: str, data: Path, done: dict[str, Fitted], rng: np.random.Generator, fitted: Fitted) -> Fitted:
    """Add all-reduce (in one host, across nodes) and the host's part of a step to `fitted`."""
    entry = MEASURED[name]
    provenance, borrowed, errors = dict(fitted.provenance), dict(fitted.borrowed), dict(fitted.errors)
    all_reduce: ReduceCosts = {}
    if entry.all_reduce_gpu:
        all_reduce, found, reduce_rows = fit_all_reduce(data, entry.all_reduce_gpu, rng)
        errors |= found
        what = f"{entry.all_reduce_gpu} custom all-reduce, {entry.all_reduce_link}"
        provenance["all_reduce"] = _provenance("aiconfigurator", reduce_rows, what)
    cross_node: CrossNode = ()
    if entry.network:
        cross_node, found = fit_cross_node(data, entry.network, rng)
        errors |= found
        held = int(found["all_reduce_cross_node"]["rows"])
        provenance["all_reduce_cross_node"] = _provenance("vidur", held, f"held out of {entry.network}, NCCL, twice as many fitted")
    kernels = replace(fitted.kernels, all_reduce={ranks: row[:2] for ranks, row in all_reduce.items()})
    eager: EagerFit | None = None
    if entry.splitwise:
        rows = M.splitwise_iterations(data, entry.splitwise)
        eager = fit_splitwise(kernels, rows, rng)
        errors |= eager.errors
        provenance["eager"] = _provenance("splitwise", len(rows), f"{entry.splitwise}, Llama-2-70B TP 2, 4, 8, vLLM of 2023")
    if entry.vllm_run:
        seconds = M.vllm_run_seconds(data, entry.vllm_run)
        host = fit_vllm_run(kernels, seconds, rng)
        errors |= host.errors
        provenance["step"] = _provenance("llmservingsim", len(seconds), "seconds of served Llama-3.1-8B, vLLM 0.19, graphs")
    else:
        host = replace(done[entry.stand_in].host, errors={})
        borrowed["step"] = done[entry.stand_in].borrowed.get("step", entry.stand_in)
    link = (entry.all_reduce_link, entry.link_bandwidth)
    return Fitted(kernels, host, eager, all_reduce, errors, provenance, borrowed, *link, cross_node)


def fit_helix_profile(name: str, data: Path, done: dict[str, Fitted], reference: HelixFit, rng: np.random.Generator) -> Fitted:
    """A profile known only from Helix layer times; attention scaled from A100 by the ratio of Helix's own slopes."""
    gpu, machine = HELIX_MACHINES[name]
    peaks = M.peaks_of(data, gpu)
    rows = M.helix_layer_times(data, machine)
    helix = fit_helix(rows, peaks, rng)
    a100 = done["a100"].kernels
    a100_peaks = M.peaks_of(data, "A100-40G-SXM4")
    share = reference.kv_s_per_sequence_byte * a100_peaks.memory_bytes_per_s
    share /= helix.kv_s_per_sequence_byte * peaks.memory_bytes_per_s
    efficiency = float(np.clip(a100.decode.efficiency * share, 0.05, 1.0))
    # A layer time from Helix holds GEMMs, small kernels and launch; nothing of it may be counted twice.
    decode = AttentionFit(efficiency, 0.0, np.ones(CONTEXT_KNOTS))
    speed = helix.gemm.compute_efficiency / reference.gemm.compute_efficiency
    prefill = replace(a100.prefill, efficiency=float(np.clip(a100.prefill.efficiency * speed, 0.05, 1.0)))
    kernels = Kernels(peaks, helix.gemm, prefill, decode, (0.0, 0.0), {})
    borrowed = {
        "attention": "a100, efficiencies scaled by Helix's layer times of this GPU against A100-40G",
        "elementwise": "zero: contained in Helix's layer times",
        "step": "rtxpro6000",
    }
    provenance = {"gemm": _provenance("helix", len(rows), f"{machine}, whole layers, Llama-1-30B, Llama-2-70B, times rounded")}
    return Fitted(kernels, replace(done["rtxpro6000"].host, errors={}), None, {}, helix.errors, provenance, borrowed)


def _lend_all_reduce(done: dict[str, Fitted], lender: str, borrowers: tuple[str, ...]) -> None:
    """Latency of the custom all-reduce over PCIe 4 for cards whose own was not measured; bandwidth stays the link's."""
    for name in borrowers:
        done[name] = replace(
            done[name],
            all_reduce=done[lender].all_reduce,
            all_reduce_link=done[lender].all_reduce_link,
            link_bandwidth=True,
            borrowed=done[name].borrowed | {"all_reduce": f"{lender}, latency over {done[lender].all_reduce_link} only"},
        )


def to_json(fitted: Fitted) -> dict[str, Any]:
    kernels = fitted.kernels
    ranks = sorted(fitted.all_reduce)
    entry: dict[str, Any] = {
        "compute_efficiency": kernels.gemm.compute_efficiency,
        "memory_efficiency": kernels.gemm.memory_efficiency,
        "gemm_overhead_s": kernels.gemm.overhead_s,
        "gemm_residual": kernels.gemm.residual,
        "prefill_attention_efficiency": kernels.prefill.efficiency,
        "prefill_residual": kernels.prefill.residual,
        "decode_attention_efficiency": kernels.decode.efficiency,
        "decode_residual": kernels.decode.residual,
        "attention_overhead_s": kernels.decode.overhead_s,
        "elementwise_s_per_byte": kernels.elementwise[1],
        "elementwise_overhead_s": kernels.elementwise[0],
        "step_base_s": fitted.host.base_s,
        "step_per_sequence_s": fitted.host.per_sequence_s,
        "eager": None if fitted.eager is None else _eager_json(fitted.eager),
        "all_reduce_link": fitted.all_reduce_link,
        "all_reduce_uses_link_bandwidth": fitted.link_bandwidth,
        "all_reduce_ranks": ranks,
        "all_reduce_alpha_s": [fitted.all_reduce[r][0] for r in ranks],
        "all_reduce_beta_s_per_byte": [fitted.all_reduce[r][1] for r in ranks],
        "all_reduce_eager_alpha_s": [fitted.all_reduce[r][2] for r in ranks],
        "cross_node_all_reduce": fitted.cross_node,
        "borrowed": fitted.borrowed,
        "provenance": fitted.provenance,
        "held_out_error": fitted.errors,
    }
    return {key: _rounded(value) for key, value in entry.items()}


def _eager_json(eager: EagerFit) -> dict[str, Any]:
    return {
        "base_s": eager.base_s,
        "per_sequence_s": eager.per_sequence_s,
        "decode_floor_s_per_layer": eager.decode_floor_s_per_layer,
        "prefill_base_s": eager.prefill_base_s,
        "prefill_per_sequence_s": eager.prefill_per_sequence_s,
        "prefill_floor_s_per_layer": eager.prefill_floor_s_per_layer,
        "ranks": list(SPLITWISE_RANKS),
        "extra_beta_s_per_byte": [eager.extra_beta_s_per_byte[ranks] for ranks in SPLITWISE_RANKS],
    }


def _rounded(value: Any) -> Any:
    """Five significant digits: more would claim what the data do not hold, and make diffs noisy."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def fit_all(data: Path) -> dict[str, Any]:
    """The whole JSON document. Each profile has its own child generator, so adding one moves no other's split."""
    names = [*FIT_ORDER, *HELIX_MACHINES]
    rngs = dict(zip(names, np.random.default_rng(SEED).spawn(len(names)), strict=True))
    done: dict[str, Fitted] = {}
    for name in FIT_ORDER:
        done[name] = fit_measured(name, data, done, rngs[name])
    _lend_all_reduce(done, "l40s", ("rtx4090",))
    reference = fit_helix(M.helix_layer_times(data, "a100"), M.peaks_of(data, "A100-40G-SXM4"), np.random.default_rng(SEED))
    for name in HELIX_MACHINES:
        done[name] = fit_helix_profile(name, data, done, reference, rngs[name])
    _lend_all_reduce(done, "l40s", ("l4", "a40"))
    return {
        "schema_version": SCHEMA_VERSION,
        "seed": SEED,
        "held_out": "a seeded random third of each table's rows; see docs/calibration.md",
        "profiles": {name: to_json(done[name]) for name in sorted(done)},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/calibration"), help="folder with the timing tables")
    parser.add_argument("--out", type=Path, default=Path("envs/perf_model/coefficients.json"), help="file to write")
    arguments = parser.parse_args(argv)
    if not (arguments.data / "gpu_specs.csv").exists():
        print(f"no gpu_specs.csv in {arguments.data}; give --data the folder of the timing tables", file=sys.stderr)
        return 2
    document = fit_all(arguments.data)
    parse_profiles(document)  # refuse to write what the reader would refuse
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
