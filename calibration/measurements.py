"""Reads the published timing tables and turns each into arrays in seconds, bytes, FLOP and tokens.

Unit traps live here and nowhere else: Vidur sizes are bytes and times ms, aiconfigurator message sizes are
2-byte elements and times ms, LLMServingSim times are us.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
NUMBER_BYTES = 2.0

SOURCES = {
    "vidur": "microsoft/vidur@7d47513 (MIT)",
    "splitwise": "Mutinifni/splitwise-sim@8f99e7d (MIT)",
    "helix": "Thesys-lab/Helix-ASPLOS25@148b733 (Apache-2.0)",
    "aiconfigurator": "ai-dynamo/aiconfigurator@095f58a (Apache-2.0)",
    "llmservingsim": "casys-kaist/LLMServingSim@5daddb2 (MIT)",
}

PREFILL_CHUNK_MIN = 128
DECODE_KV_TOKENS_MIN = 1024
"""Attention calls smaller than these are all launch cost and do not show in a step; they are neither fitted nor scored."""

MLP_WIDTH = {"Llama-3.1-8B": 14336, "Qwen3-32B": 25600}


@dataclass(frozen=True, slots=True)
class Peaks:
    """Datasheet peaks of one GPU (dense 16-bit, fp32 accumulation)."""

    flop_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LayerGemms:
    """GEMM times by layer. Arrays of shape (rows, ops): 4 GEMMs of a dense layer; `tokens`, `unit` of shape (rows,)."""

    tokens: FloatArray
    flop: FloatArray
    bytes_moved: FloatArray
    measured_s: FloatArray
    unit: npt.NDArray[np.object_]

    def rows(self, chosen: npt.NDArray[np.bool_]) -> LayerGemms:
        return LayerGemms(self.tokens[chosen], self.flop[chosen], self.bytes_moved[chosen], self.measured_s[chosen], self.unit[chosen])


@dataclass(frozen=True, slots=True)
class Timings:
    """Times against one explaining quantity: `work` (FLOP or bytes), `context` (tokens), `measured_s`; shape (rows,)."""

    work: FloatArray
    context: FloatArray
    measured_s: FloatArray

    def rows(self, chosen: npt.NDArray[np.bool_]) -> Timings:
        return Timings(self.work[chosen], self.context[chosen], self.measured_s[chosen])

    def __len__(self) -> int:
        return len(self.measured_s)


def peaks_of(data: Path, gpu: str) -> Peaks:
    """Peaks of a row of gpu_specs.csv. Raises ValueError when the GPU has no row."""
    table = pd.read_csv(data / "gpu_specs.csv").set_index("gpu")
    if gpu not in table.index:
        raise ValueError(f"gpu_specs.csv has no GPU {gpu!r}; known: {', '.join(table.index)}")
    row = table.loc[[gpu], ["fp16_dense_tflops", "mem_gbs"]].to_numpy(float)[0]
    return Peaks(float(row[0]) * 1e12, float(row[1]) * 1e9)


def gemm_work(m: FloatArray, n: FloatArray, k: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(FLOP, bytes) of C[m,n] = A[m,k] B[k,n] with 2-byte numbers, every operand moved once."""
    return 2.0 * m * n * k, NUMBER_BYTES * (m * k + k * n + m * n)


def layer_shapes(hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, gated: bool, tp: int) -> list[tuple[float, float]]:
    """(n, k) of the QKV, output, up (with gate) and down GEMMs of one rank; KV heads are copied where tp exceeds them."""
    query, kv = heads * head_dim / tp, max(kv_heads / tp, 1.0) * head_dim
    width = mlp / tp
    return [(query + 2 * kv, hidden), (hidden, query), ((2 if gated else 1) * width, hidden), (hidden, width)]


def vidur_layer_gemms(data: Path, gpu: str) -> LayerGemms:
    """Vidur mlp.csv of all models of one GPU; `unit` is the model."""
    ops = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    parts = []
    for path in sorted((data / "vidur" / "compute" / gpu).glob("**/mlp.csv.gz")):
        table = pd.read_csv(path)
        for _, rows in table.groupby("num_tensor_parallel_workers"):
            first = rows.iloc[0]
            columns = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp")
            heads, kv_heads, hidden, mlp, gated = (int(first[column]) for column in columns)
            shapes = layer_shapes(
                hidden, heads, kv_heads, hidden // heads, mlp, bool(gated), int(rows["num_tensor_parallel_workers"].iloc[0])
            )
            m = rows["num_tokens"].to_numpy(float)[:, None]
            n, k = (np.array(column, float)[None, :] for column in zip(*shapes, strict=True))
            flop, moved = gemm_work(m, n, k)
            measured_s = rows[[f"time_stats.{op}.median" for op in ops]].to_numpy(float) * 1e-3
            unit = np.full(len(rows), path.parent.name, dtype=object)
            parts.append(LayerGemms(m[:, 0], flop, moved, measured_s, unit))
    return _concatenate(parts)


def vidur_elementwise(data: Path, gpu: str) -> Timings:
    """Sum of norms, rope, activation and two residual adds of one layer against activation bytes (see KernelProfile)."""
    works, times = [], []
    for path in sorted((data / "vidur" / "compute" / gpu).glob("**/mlp.csv.gz")):
        table = pd.read_csv(path)
        head_dim = table["n_embd"] / table["n_head"]
        tp = table["num_tensor_parallel_workers"]
        heads = table["n_head"] / tp + (table["n_kv_head"] / tp).clip(lower=1)
        width = table["n_expanded_embd"] / tp
        works.append((2.0 * table["num_tokens"] * (8 * table["n_embd"] + 2 * heads * head_dim + 3 * width)).to_numpy(float))
        ops = {"input_layernorm": 1, "post_attention_layernorm": 1, "attn_rope": 1, "mlp_act": 1, "add": 2}
        present = {op: count for op, count in ops.items() if table.get(f"time_stats.{op}.median") is not None}
        columns = [count * table[f"time_stats.{op}.median"].fillna(0.0).to_numpy(float) for op, count in present.items()]
        times.append(np.sum(columns, axis=0) * 1e-3)
    work = np.concatenate(works)
    return Timings(work, np.ones_like(work), np.concatenate(times))


def aiconfigurator_gemms(data: Path, gpu: str, tokens_max: int = 16384) -> LayerGemms:
    """aiconfigurator GEMM grid, weights between 4 and 512 MiB (the size of layer shards); one op a row, `unit` its shape."""
    table = pd.read_csv(data / "aiconfigurator" / gpu / "gemm.csv.gz")
    weight_bytes = NUMBER_BYTES * table["n"] * table["k"]
    is_layer_like = weight_bytes.between(4 * 2**20, 512 * 2**20) & table["k"].ge(1024) & table["n"].ge(1024)
    table = table[(table["m"] <= tokens_max) & is_layer_like]
    m, n, k = (table[column].to_numpy(float)[:, None] for column in ("m", "n", "k"))
    flop, moved = gemm_work(m, n, k)
    unit = np.array([f"{a}x{b}" for a, b in zip(table["n"], table["k"], strict=True)], dtype=object)
    return LayerGemms(m[:, 0], flop, moved, table["latency"].to_numpy(float)[:, None] * 1e-3, unit)


def llmservingsim_models(data: Path, hardware: str) -> list[tuple[str, int, Path]]:
    """(model, tp, folder) of the dense models profiled on that hardware."""
    found = []
    for folder in sorted((data / "llmservingsim" / hardware).glob("*/*/bf16/tp*")):
        model = folder.parent.parent.name
        if model in MLP_WIDTH and (folder / "dense.csv.gz").exists():
            found.append((model, int(folder.name[2:]), folder))
    return found


LLMSERVINGSIM_DIMS = {"Llama-3.1-8B": (4096, 32, 8, 128), "Qwen3-32B": (5120, 64, 8, 128)}
"""hidden, query heads, KV heads, head_dim of the profiled models (their public config.json)."""


def llmservingsim_gemms(data: Path, hardware: str) -> LayerGemms:
    """Dense GEMMs one op a row (a third of the rows is missing at random, so layers are rarely whole); `unit` = model/tp/op."""
    parts = []
    for model, tp, folder in llmservingsim_models(data, hardware):
        hidden, heads, kv_heads, head_dim = LLMSERVINGSIM_DIMS[model]
        shapes = layer_shapes(hidden, heads, kv_heads, head_dim, MLP_WIDTH[model], True, tp)
        table = pd.read_csv(folder / "dense.csv.gz")
        for op, (n, k) in zip(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), shapes, strict=True):
            rows = table[table["layer"] == op]
            m = rows["tokens"].to_numpy(float)[:, None]
            flop, moved = gemm_work(m, np.full((1, 1), n), np.full((1, 1), k))
            unit = np.full(len(rows), f"{model}/tp{tp}/{op}", dtype=object)
            parts.append(LayerGemms(m[:, 0], flop, moved, rows["time_us"].to_numpy(float)[:, None] * 1e-6, unit))
    return _concatenate(parts)


def llmservingsim_elementwise(data: Path, hardware: str) -> Timings:
    """Small kernels of a layer, each interpolated to the token counts of the activation, then summed."""
    works, times = [], []
    for model, tp, folder in llmservingsim_models(data, hardware):
        hidden, heads, kv_heads, head_dim = LLMSERVINGSIM_DIMS[model]
        table = pd.read_csv(folder / "dense.csv.gz")
        tokens = np.sort(table.loc[table["layer"] == "act_fn", "tokens"].to_numpy(float))
        total_s = np.zeros_like(tokens)
        for op, count in (("act_fn", 1), ("layernorm", 2), ("rotary_emb", 1), ("qk_norm", 1)):
            rows = table[table["layer"] == op].sort_values("tokens")
            if len(rows):
                total_s += count * np.interp(tokens, rows["tokens"].to_numpy(float), rows["time_us"].to_numpy(float)) * 1e-6
        per_rank = 2 * (heads / tp + max(kv_heads / tp, 1)) * head_dim + 3 * MLP_WIDTH[model] / tp
        works.append(2.0 * tokens * (8 * hidden + per_rank))
        times.append(total_s)
    work = np.concatenate(works)
    return Timings(work, np.ones_like(work), np.concatenate(times))


def prefill_flop(heads: FloatArray, head_dim: FloatArray, chunk: FloatArray, past: FloatArray) -> FloatArray:
    """Causal attention FLOP of `chunk` new tokens after `past` cached ones (QK^T and PV, 2 FLOP a multiply-add)."""
    return 4.0 * heads * head_dim * (chunk * past + chunk**2 / 2.0)


def aiconfigurator_attention(data: Path, gpu: str) -> tuple[Timings, Timings]:
    """(prefill, decode) of aiconfigurator's attention tables: work is FLOP, then KV bytes."""
    prefill = pd.read_csv(data / "aiconfigurator" / gpu / "context_attention.csv.gz")
    prefill = prefill[(prefill["isl"] >= PREFILL_CHUNK_MIN) & (prefill["num_heads"] >= 4)]
    heads, batch, length = (prefill[column].to_numpy(float) for column in ("num_heads", "batch_size", "isl"))
    flop = batch * prefill_flop(heads, prefill["head_dim"].to_numpy(float), length, np.zeros_like(length))
    decode = pd.read_csv(data / "aiconfigurator" / gpu / "generation_attention.csv.gz")
    sharing = decode["num_heads"] / decode["num_key_value_heads"]
    decode = decode[sharing.between(4, 8) & (decode["num_heads"] >= 8)]
    decode = decode[decode["batch_size"] * (decode["isl"] + decode["step"]) >= DECODE_KV_TOKENS_MIN]
    context = (decode["isl"] + decode["step"]).to_numpy(float)
    width = (decode["batch_size"] * decode["num_key_value_heads"] * decode["head_dim"]).to_numpy(float)
    kv_bytes = 2.0 * NUMBER_BYTES * context * width
    return (
        Timings(flop, length, prefill["latency"].to_numpy(float) * 1e-3),
        Timings(kv_bytes, context, decode["latency"].to_numpy(float) * 1e-3),
    )


def llmservingsim_attention(data: Path, hardware: str) -> tuple[Timings, Timings]:
    """(prefill, decode): rows with only one of the two phases; a prefill row's context is chunk + past."""
    prefills, decodes = [], []
    for model, tp, folder in llmservingsim_models(data, hardware):
        _, heads, kv_heads, head_dim = LLMSERVINGSIM_DIMS[model]
        table = pd.read_csv(folder / "attention.csv.gz")
        rows = table[(table["n_decode"] == 0) & (table["prefill_chunk"] >= PREFILL_CHUNK_MIN)]
        chunk, past = rows["prefill_chunk"].to_numpy(float), rows["kv_prefill"].to_numpy(float)
        flop = prefill_flop(np.full_like(chunk, heads / tp), np.full_like(chunk, head_dim), chunk, past)
        prefills.append(Timings(flop, chunk + past, rows["time_us"].to_numpy(float) * 1e-6))
        rows = table[(table["prefill_chunk"] == 0) & (table["n_decode"] * table["kv_decode"] >= DECODE_KV_TOKENS_MIN)]
        context = rows["kv_decode"].to_numpy(float)
        kv_bytes = 2.0 * NUMBER_BYTES * context * rows["n_decode"].to_numpy(float) * max(kv_heads / tp, 1) * head_dim
        decodes.append(Timings(kv_bytes, context, rows["time_us"].to_numpy(float) * 1e-6))
    return _join(prefills), _join(decodes)


def vidur_all_reduce(data: Path, network: str, ranks: int, ranks_per_node: int) -> Timings:
    """Vidur NCCL all-reduce of one placement: work is bytes (upstream's `size` is in bytes)."""
    table = pd.read_csv(data / "vidur" / "network" / network / "all_reduce.csv.gz")
    rows = table[(table["num_workers"] == ranks) & (table["devices_per_node"] == ranks_per_node)]
    size = rows["size"].to_numpy(float)
    return Timings(size, np.ones_like(size), rows["time_stats.all_reduce.median"].to_numpy(float) * 1e-3)


def aiconfigurator_all_reduce(data: Path, gpu: str, ranks: int, backend: str) -> Timings:
    """vLLM's custom all-reduce, backend "graph" or "eager": work is bytes (upstream counts 2-byte elements)."""
    table = pd.read_csv(data / "aiconfigurator" / gpu / "custom_allreduce.csv.gz")
    rows = table[(table["num_gpus"] == ranks) & (table["backend"] == f"vllm_{backend}")]
    size = NUMBER_BYTES * rows["message_size"].to_numpy(float)
    return Timings(size, np.ones_like(size), rows["latency"].to_numpy(float) * 1e-3)


def helix_layer_times(data: Path, machine: str) -> pd.DataFrame:
    """Helix layer tables of one machine: columns model, phase, batch (tokens or sequences), measured_s; zero rows dropped."""
    table = pd.read_csv(data / "helix" / "layer_time.csv.gz")
    rows = table[(table["machine"] == machine) & (table["batch_tokens_or_seqs"] > 0)]
    return pd.DataFrame(
        {
            "model": rows["model"],
            "phase": rows["phase"],
            "batch": rows["batch_tokens_or_seqs"].astype(float),
            "measured_s": rows["time_ms_per_layer"] * 1e-3,
        }
    ).reset_index(drop=True)


def splitwise_iterations(data: Path, hardware: str) -> pd.DataFrame:
    """splitwise-sim, Llama-2-70B: tp, prompt, batch, output (tokens), prompt_s, token_s. End to end, vLLM of 2023."""
    table = pd.read_csv(data / "splitwise-sim" / "perf_model.csv.gz")
    rows = table[(table["model"] == "llama2-70b") & (table["hardware"] == hardware)]
    return pd.DataFrame(
        {
            "tp": rows["tensor_parallel"].astype(int),
            "prompt": rows["prompt_size"].astype(float),
            "batch": rows["batch_size"].astype(float),
            "output": rows["token_size"].astype(float),
            "prompt_s": rows["prompt_time"] * 1e-3,
            "token_s": rows["token_time"] * 1e-3,
        }
    ).reset_index(drop=True)


def vllm_run_seconds(data: Path, hardware: str) -> pd.DataFrame:
    """Seconds of the served Llama-3.1-8B run without any prompt work: columns sequences, kv_tokens, step_s.

    Mean of the running counts at both ends of a second, since requests finish inside it; seconds with under 4 sequences
    with requests waiting, or next to prompt work are dropped. KV tokens are recounted from the requests' own stamps.
    """
    folder = data / "llmservingsim" / "vllm_runs" / hardware / "Llama-3.1-8B" / "vllm"
    table = pd.read_csv(folder / "timeseries.csv.gz")
    requests = pd.read_json(folder / "requests.jsonl.gz", lines=True)
    # The sampler's clock starts with the run; the last token of the last request falls into its last busy second.
    start = requests["last_token_ts"].max() - table.loc[table["gen_throughput"] > 0, "t"].max() + 0.5
    quiet = table["prompt_throughput"].eq(0) & table["prompt_throughput"].shift(1).eq(0)
    running = (table["running"] + table["running"].shift(1)) / 2
    # With requests waiting, the cache is full and preempted ones are computed again unseen.
    chosen = quiet & table["waiting"].eq(0) & running.ge(4) & table["gen_throughput"].gt(0)
    rows = []
    for second, sequences, generated in zip(table["t"][chosen], running[chosen], table["gen_throughput"][chosen], strict=True):
        now = start + second - 0.5
        alive = requests[(requests["first_token_ts"] <= now) & (requests["last_token_ts"] > now)]
        done = (now - alive["first_token_ts"]) / (alive["last_token_ts"] - alive["first_token_ts"])
        held = float((alive["input_toks"] + done * alive["output_toks"]).sum())
        rows.append((float(sequences), held * float(sequences) / max(len(alive), 1), float(sequences) / float(generated)))
    return pd.DataFrame(rows, columns=["sequences", "kv_tokens", "step_s"])


def _join(parts: list[Timings]) -> Timings:
    return Timings(*(np.concatenate([getattr(part, field) for part in parts]) for field in ("work", "context", "measured_s")))


def _concatenate(parts: list[LayerGemms]) -> LayerGemms:
    return LayerGemms(*(np.concatenate([getattr(part, field) for part in parts]) for field in LayerGemms.__slots__))
