"""What a decode graph would record, run directly on a CPU: the logits of the undivided model, at every shape and after every change."""

from __future__ import annotations

import pytest
import torch
from fake_ranks import run_ranks
from small_models import oracle_logits, random_ids, small_model, written

from envs.decision.layer_cuts import layer_plans
from runtime.torch_tp.checkpoint import open_checkpoint
from runtime.torch_tp.elementwise import TorchElementwise
from runtime.torch_tp.graph_step import ROWS_MAX, GraphStep, direct
from runtime.torch_tp.kv_pages import PagedKv
from runtime.torch_tp.model import Slice, TpModel
from runtime.torch_tp.torch_step import TorchStep

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """Three query heads to a KV head: cuts run through groups."""
    model = small_model("qwen3", num_hidden_layers=3, head_dim=8, hidden_size=32, intermediate_size=40)
    return open_checkpoint(written(model, tmp_path_factory.mktemp("graphs"))), model


def paged(model: TpModel, counted: list[int]) -> TpModel:
    """The model as it is on a GPU, with decode steps as functions called directly; `counted` grows with every recording."""

    def record(act):
        counted.append(1)
        return direct(act)

    model.kv = PagedKv(model.config, tokens_max=400, slots_max=8, device=model.device, dtype=model.dtype)
    model._row_steps = []
    model._torch_steps = [TorchStep(model.config, model._weights, model.kv, model._shares, TorchElementwise()) for _ in range(2)]
    model._graph_steps = [GraphStep(model.config, model._weights, model.kv, model._shares, record) for _ in range(2)]
    return model


@pytest.mark.parametrize("shares", [(1.0,), (4.0, 2.0), (5.0, 1.0), (1.0, 0.0)])
def test_decode_across_pages_and_batches(grouped, shares):
    """Sequences of unlike length that begin and end, over page ends and shapes: every token's logits are the model's own."""
    checkpoint, oracle = grouped
    vocabulary = checkpoint.config.vocabulary
    texts = {slot: random_ids(44, vocabulary, seed=slot) for slot in range(3)}
    lengths = {0: 14, 1: 3, 2: 30}
    wanted = {slot: oracle_logits(oracle, ids) for slot, ids in texts.items()}

    def work(communicator):
        counted: list[int] = []
        model = paged(TpModel(checkpoint, communicator, rank=communicator.rank), counted)
        model.use_plan(layer_plans(checkpoint.config.to_spec(), shares, version=2, mlp_block=8))
        rows: list[tuple[int, int, torch.Tensor]] = []
        held = dict(lengths)
        for slot, count in lengths.items():
            model.kv.allocate(slot, 2, 60)
            model.forward([Slice(slot, 2, texts[slot][:count], 0, wants_logits=False)])
        for step in range(14):
            slots = [slot for slot in (0, 1, 2) if not (slot == 2 and step >= 9)]
            if step == 9:
                model.kv.release(2)
            logits = model.forward([Slice(slot, 2, texts[slot][held[slot] : held[slot] + 1], held[slot]) for slot in slots])
            for slot, row in zip(slots, logits, strict=True):
                rows.append((slot, held[slot], row.clone()))
                held[slot] += 1
        return rows, sum(counted)

    results = run_ranks(len(shares), work)
    for number, (slot, position, _) in enumerate(results[0][0]):
        got = torch.cat([rows[number][2] for rows, _ in results])
        torch.testing.assert_close(got, wanted[slot][position], atol=TOLERANCE, rtol=0)
    # three shapes at most (rows 4 and 2, pages 2 to 4), each recorded once per half layer
    layers = checkpoint.config.layers
    assert all(count % (2 * layers) == 0 and 1 <= count // (2 * layers) <= 3 for _, count in results)


def test_new_ranges_are_recorded_anew(grouped):
    """A wider plan replaces the pool, a slide of columns the matrices: nothing old may be replayed."""
    checkpoint, oracle = grouped
    spec, ids = checkpoint.config.to_spec(), random_ids(30, checkpoint.config.vocabulary)
    wanted = oracle_logits(oracle, ids)

    def work(communicator):
        model = paged(TpModel(checkpoint, communicator, rank=communicator.rank), [])
        model.use_plan(layer_plans(spec, (1.0, 5.0), version=1, mlp_block=8))
        got = []
        for slot, version in ((0, 1), (1, 2)):
            if version == 2:
                model.use_plan(layer_plans(spec, (1.0, 0.0), version=2, mlp_block=8))
            model.kv.allocate(slot, version, 40)
            model.forward([Slice(slot, version, ids[:20], 0, wants_logits=False)])
            for position in range(20, 24):
                got.append((position, model.forward([Slice(slot, version, ids[position : position + 1], position)])))
        model.slide_columns(layer_plans(spec, (1.0, 0.0), mlp_shares=(1.0, 1.0), version=2, mlp_block=8))
        got.append((24, model.forward([Slice(1, 2, ids[24:25], 24)])))
        return got

    first, second = run_ranks(2, work)
    for (position, left), (_, right) in zip(first, second, strict=True):
        torch.testing.assert_close(torch.cat([left[0], right[0]]), wanted[position], atol=TOLERANCE, rtol=0)


def test_prompts_and_mixed_plans_are_left_to_others(grouped):
    checkpoint, _ = grouped

    def work(communicator):
        counted: list[int] = []
        model = paged(TpModel(checkpoint, communicator, rank=0), counted)
        for version in (1, 2):
            model.use_plan(layer_plans(checkpoint.config.to_spec(), (1.0,), version=version, mlp_block=8))
            model.kv.allocate(version, version, 40)
        model.forward([Slice(1, 1, [1, 2, 3], 0), Slice(2, 2, [4], 0)])
        model.forward([Slice(1, 1, [1], 3), Slice(2, 2, [4], 1)])
        return sum(counted)

    assert run_ranks(1, work) == [0]
    assert ROWS_MAX >= 8
