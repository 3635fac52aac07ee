"""Checkpoints: views on the mapped file, and one clear line for everything that is wrong."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import small_model, written

from runtime.torch_tp import model_cache
from runtime.torch_tp.checkpoint import CheckpointError, expected_shapes, find_model, float32_copy, open_checkpoint
from runtime.torch_tp.config import config_of, read_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(small_model("qwen2"), tmp_path / "model")


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_tensors_are_views_of_the_mapped_file(folder):
    """Values as the safetensors package reads them, at addresses inside one mapping; a slice of a view stays a view."""
    checkpoint = open_checkpoint(folder)
    expected = load_file(folder / "model.safetensors")
    assert set(expected) == set(expected_shapes(checkpoint.config))
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in maps if line.endswith(f"{folder}/model.safetensors")]

    def inside(address: int) -> bool:
        return any(int(low, 16) <= address < int(high, 16) for low, high in mapped)

    weight = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert inside(weight.data_ptr()) and inside(weight[3:7].data_ptr()) and inside(weight[:, 8:].data_ptr())


def test_writing_to_a_view_never_reaches_the_disk(folder):
    before = (folder / "model.safetensors").read_bytes()
    open_checkpoint(folder).tensor("model.norm.weight").fill_(7.0)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_a_pickle_is_refused_and_never_opened(folder, name):
    """The file would leave a mark if it were unpickled."""
    mark = folder / "was-run"

    class Payload:
        def __reduce__(self):
            return (Path.touch, (mark,))

    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match="a pickle, which can run code; convert it") as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)
    assert not mark.exists()


def _cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _header(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def _drop_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save_file(tensors, path)


def _index(folder: Path, places: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


BAD = {
    "no config": (lambda f: (f / "config.json").unlink(), "no such file"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), "not readable as JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object, got list"),
    "unknown family": (lambda f: change_config(f, model_type="qwen"), r"did you mean .*\? known: llama, mistral, qwen2, qwen3"),
    "heads no number": (lambda f: change_config(f, num_attention_heads="6"), "num_attention_heads='6' .* whole number"),
    "heads that do not divide": (lambda f: change_config(f, num_key_value_heads=4), "no multiple of kv_heads=4"),
    "odd head": (lambda f: change_config(f, head_dim=7), "head_dim=7 is odd"),
    "unknown rope": (
        lambda f: change_config(f, rope_parameters={"rope_type": "longrope"}),
        "rope scaling .*known: default, dynamic, linear",
    ),
    "rope factor": (lambda f: change_config(f, rope_parameters={"rope_type": "linear", "factor": 0.5}), "factor=0.5 at least 1"),
    "quantised": (lambda f: change_config(f, quantization_config={"bits": 4}), "quantised safetensors are not supported"),
    "activation": (lambda f: change_config(f, hidden_act="gelu"), "hidden_act='gelu' is not supported"),
    "sliding window": (lambda f: change_config(f, use_sliding_window=True, sliding_window=64), "sliding-window attention"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors and no"),
    "empty weights": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "not a safetensors file, damaged or cut short .* fetch it again",
    ),
    "weights are text": (lambda f: (f / "model.safetensors").write_bytes(b"<html>" * 9), "not a safetensors file"),
    "weights cut short": (_cut_short, "cut short .* fetch it again"),
    "header is no object": (
        lambda f: (f / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"[3] "),
        "not a safetensors file, damaged",
    ),
    "wrong offsets": (lambda f: _header(f, lambda h: h["model.norm.weight"]["data_offsets"].__setitem__(1, 3)), "damaged or cut short"),
    "wrong dtype": (lambda f: _header(f, lambda h: h["model.norm.weight"].update(dtype="I32")), "dtype 'I32', which is not supported"),
    "tensor missing": (_drop_tensor, "'model.layers.1.self_attn.k_proj.bias' is missing"),
    "wrong shape": (lambda f: change_config(f, intermediate_size=64), r"has shape \(80, 48\), config.json implies \(64, 48\)"),
    "index names nothing": (lambda f: _index(f, None), "weight_map must map"),
    "index leaves the folder": (lambda f: _index(f, {"a": "../model.safetensors"}), "file names beside it"),
    "index lies": (lambda f: _index(f, {"a": "model.safetensors"}), "which does not hold it"),
    "shard missing": (lambda f: _index(f, {"a": "model-2.safetensors"}), "cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gets_one_clear_line(folder, case):
    spoil, said = BAD[case]
    spoil(folder)
    with pytest.raises(CheckpointError, match=said) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)


def test_names_that_lead_nowhere(tmp_path):
    with pytest.raises(CheckpointError, match=r"no such model; .* smollm2"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"expected a model directory or a .gguf file"):
        open_checkpoint(tmp_path / "weights.bin")
    with pytest.raises(CheckpointError, match="known: smollm2"):
        find_model("smollm")


def test_older_config_files_mean_the_same():
    """`rope_theta` and `rope_scaling` of transformers 4 against `rope_parameters` of 5; head_dim and KV heads by default."""
    common = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 50,
        "max_position_embeddings": 512,
    }
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    old = config_of(common | {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}, "m")
    new = config_of(common | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}, "m")
    assert old == new
    assert old.head_dim == 16 and old.kv_heads == 4 and old.rope.original_tokens == 128
    assert config_of(common | {"eos_token_id": 3}, "m", {"eos_token_id": [3, 9]}).eos_ids == (3, 9)
    assert config_of(common, "m").eos_ids == ()
    assert old.to_spec("bf16").weight_bytes * 2 == old.to_spec().weight_bytes


def test_generation_config_adds_end_tokens(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_config(folder).eos_ids == (5, 6)


def test_a_float32_checkpoint_is_its_own_copy(folder):
    checkpoint = open_checkpoint(folder)
    assert float32_copy(checkpoint) is checkpoint


def test_cache_is_whole_or_absent(tmp_path, monkeypatch):
    """A conversion that fails leaves nothing behind and may be tried again; a finished one is not repeated; another source is."""
    monkeypatch.setenv("BALLAST_CACHE", str(tmp_path / "cache"))
    source, calls = tmp_path / "source", []
    source.write_text("a")

    def make(folder: Path) -> None:
        calls.append(folder)
        (folder / "half").write_text("x")
        if len(calls) == 1:
            raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        model_cache.cached_folder(source, 1, make)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    first = model_cache.cached_folder(source, 1, make)
    assert model_cache.cached_folder(source, 1, make) == first and len(calls) == 2
    assert (first / "half").exists()
    assert model_cache.cached_folder(source, 2, make) != first
    source.write_text("other")
    assert model_cache.cached_folder(source, 1, make) != first


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("BALLAST_CACHE", str(blocked / "cache"))
    with pytest.raises(CheckpointError, match="set BALLAST_CACHE"):
        model_cache.cached_folder(blocked, 1, lambda folder: None)


def test_processes_that_start_together_convert_once(tmp_path):
    """Three processes ask at the same time; one makes it, the others wait and find it."""
    (tmp_path / "source").write_text("a")
    code = (
        "import sys, time, pathlib\n"
        "from runtime.torch_tp.model_cache import cached_folder\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "def make(folder):\n"
        "    with open(root / 'made', 'a') as file: file.write('x')\n"
        "    time.sleep(0.3)\n"
        "print(cached_folder(root / 'source', 1, make))\n"
    )
    environment = {**os.environ, "BALLAST_CACHE": str(tmp_path / "cache")}
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment, text=True) for _ in range(3)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in running}
    assert len(outputs) == 1 and (tmp_path / "made").read_text() == "x"
