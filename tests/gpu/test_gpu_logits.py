"""One device, ranks as threads: the logits of the undivided model, whatever the plan, the KV store, and how a step is launched."""

from __future__ import annotations

import pytest
import torch
from fake_ranks import run_ranks
from small_models import oracle_logits, random_ids

from envs.decision.layer_cuts import layer_plans
from runtime.torch_tp.communicators.serial import SerialCommunicator
from runtime.torch_tp.kv_pages import PagedKv
from runtime.torch_tp.kv_slots import SlotKv
from runtime.torch_tp.model import Slice, TpModel
from runtime.torch_tp.shares import Interval

TOLERANCE = 1e-4
SPLITS = [(1.0,), (1.0, 1.0), (5.0, 1.0), (4.0, 0.0, 2.0), (3.0, 1.0, 1.0, 1.0)]


def model_on(checkpoint, communicator, device, cuda_graphs=False) -> TpModel:
    return TpModel(checkpoint, communicator, device=device, rank=communicator.rank, kv_tokens_max=256, slots_max=4, cuda_graphs=cuda_graphs)


def greedy_logits(checkpoint, device, shares, ids, *, cuda_graphs=False, prompt=7):
    """Whole logits of every position from the prompt's last on, one token at a time after the prompt."""

    def work(communicator):
        model = model_on(checkpoint, communicator, device, cuda_graphs)
        model.use_plan(layer_plans(checkpoint.config.to_spec(), shares, version=1, mlp_block=8))
        model.kv.allocate(0, 1, 128)
        rows = [model.forward([Slice(0, 1, ids[:prompt], 0)])[0].cpu()]
        rows += [model.forward([Slice(0, 1, ids[at : at + 1], at)])[0].cpu() for at in range(prompt, len(ids))]
        return torch.stack(rows)

    return torch.cat(list(run_ranks(len(shares), work)), dim=1)


@pytest.mark.parametrize("shares", SPLITS)
def test_even_and_uneven_splits_agree_with_transformers(grouped, device, shares):
    checkpoint, oracle = grouped
    ids = random_ids(40, checkpoint.config.vocabulary, seed=3)
    got = greedy_logits(checkpoint, device, shares, ids)
    torch.testing.assert_close(got, oracle_logits(oracle, ids)[6:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("shares", SPLITS[:4])
def test_recorded_decode_steps_agree_with_launched_ones(grouped, device, shares):
    """Across the ends of pages and of recorded shapes (16, 32 tokens), the same logits as without graphs."""
    checkpoint, _ = grouped
    ids = random_ids(40, checkpoint.config.vocabulary, seed=4)
    launched = greedy_logits(checkpoint, device, shares, ids)
    recorded = greedy_logits(checkpoint, device, shares, ids, cuda_graphs=True)
    torch.testing.assert_close(recorded, launched, atol=1e-5, rtol=0)


def test_recorded_steps_follow_plans_and_batches(grouped, device):
    """A wider plan (another pool), a slide of columns and batches that grow and shrink are recorded anew, not replayed from before."""
    checkpoint, oracle = grouped
    spec = checkpoint.config.to_spec()
    ids = random_ids(30, checkpoint.config.vocabulary, seed=5)
    wanted = oracle_logits(oracle, ids)

    def work(communicator):
        model = model_on(checkpoint, communicator, device, cuda_graphs=True)
        model.use_plan(layer_plans(spec, (1.0, 5.0), version=1, mlp_block=8))
        rows = []
        for slot, version in ((0, 1), (1, 2)):
            if version == 2:
                model.use_plan(layer_plans(spec, (1.0, 0.0), version=2, mlp_block=8))
            model.kv.allocate(slot, version, 60)
            model.forward([Slice(slot, version, ids[:14], 0, wants_logits=False)])
            for at in range(14, 18):
                rows.append((at, model.forward([Slice(slot, version, ids[at : at + 1], at)])[0].cpu()))
        model.slide_columns(layer_plans(spec, (1.0, 0.0), mlp_shares=(1.0, 1.0), version=2, mlp_block=8))
        for slot in (2, 3):
            model.kv.allocate(slot, 2, 60)
            model.forward([Slice(slot, 2, ids[:18], 0, wants_logits=False)])
        for row in model.forward([Slice(slot, 2, ids[18:19], 18) for slot in (1, 2, 3)]):
            rows.append((18, row.cpu()))
        return rows

    first, second = run_ranks(2, work)
    for (at, left), (_, right) in zip(first, second, strict=True):
        torch.testing.assert_close(torch.cat([left, right]), wanted[at], atol=TOLERANCE, rtol=0)


def test_pages_on_the_device_and_slots_on_the_host_hold_the_same(grouped, device):
    """The same prompt leaves the same keys and values in both stores, and both go on from what the other exported."""
    checkpoint, oracle = grouped
    config = checkpoint.config
    ids = random_ids(37, config.vocabulary, seed=6)
    models = {}
    for place in ("cpu", device):
        model = models[str(place)] = TpModel(checkpoint, SerialCommunicator(), device=place, kv_tokens_max=256, slots_max=4)
        model.use_plan(layer_plans(config.to_spec(), (1.0,), version=1))
        model.kv.allocate(0, 1, 64)
        model.kv.allocate(1, 1, 64)
        model.forward([Slice(0, 1, ids[:33], 0, wants_logits=False)])
    host, gpu = models["cpu"], models[str(device)]
    assert isinstance(host.kv, SlotKv) and isinstance(gpu.kv, PagedKv)
    every = Interval(0, config.kv_heads)
    for layer in range(config.layers):
        ours, theirs = (model.kv.export(0, layer, every, 0, 33) for model in (gpu, host))
        torch.testing.assert_close(ours.cpu(), theirs, atol=TOLERANCE, rtol=0)
        gpu.kv.import_(1, layer, every, 0, theirs)
        host.kv.import_(1, layer, every, 0, ours.cpu())
    for model in (gpu, host):
        for at in range(33, 37):
            row = model.forward([Slice(1, 1, ids[at : at + 1], at)])[0].cpu()
            torch.testing.assert_close(row, oracle_logits(oracle, ids)[at], atol=TOLERANCE, rtol=0)


def test_a_slide_inside_what_is_resident_loads_nothing(grouped, device):
    """The overlap window: columns that a rank once held stay on the device, and sliding back reads no weight byte."""
    checkpoint, _ = grouped
    spec = checkpoint.config.to_spec()
    model = TpModel(checkpoint, SerialCommunicator(), device=device, rank=0, kv_tokens_max=64, slots_max=2)
    wide, narrow = ((3.0, 1.0), (1.0, 3.0))
    model.use_plan(layer_plans(spec, (1.0, 1.0), mlp_shares=wide, version=1, mlp_block=8))
    held = model.loaded_bytes
    assert held > 0
    for shares in (narrow, wide):
        model.slide_columns(layer_plans(spec, (1.0, 1.0), mlp_shares=shares, vocabulary_shares=wide, version=1, mlp_block=8))
    assert model.loaded_bytes == held
