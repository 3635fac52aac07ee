"""oneDNN's products against float64, whatever lies where, and a real model's logits through them."""

from __future__ import annotations

import pytest
import torch

from envs.decision.layer_cuts import layer_plans
from runtime.torch_tp.checkpoint import open_checkpoint
from runtime.torch_tp.matrix_product import CHAIN, ROWS_FROM, onednn_product, product_for
from tests.runtime.torch_tp.fake_ranks import Ranks
from tests.runtime.torch_tp.small_models import loaded, oracle_logits

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch was built without oneDNN")


@pytest.mark.parametrize("rows", [ROWS_FROM - 1, ROWS_FROM, 200])
@pytest.mark.parametrize("columns", [1, 320, CHAIN, CHAIN + 1, 2 * CHAIN + 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_views_are_those_of_float64(rows, columns, has_bias):
    """Operands as ranks have them: columns out of the middle of wider tensors. Bound: the rounding of a sum of n
    products is most probably below a small multiple of sqrt(n) units in the last place of the sum of their sizes (Higham, Mary 2019)."""
    torch.manual_seed(columns)
    x, weight = torch.randn(rows, columns + 7)[:, 3 : columns + 3], torch.randn(48, columns + 9)[:, 5 : columns + 5]
    bias = torch.randn(48) if has_bias else None
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    before = x.clone(), weight.clone()
    error = (onednn_product(x, weight, bias).double() - expected).abs().max()
    assert error <= 4 * columns**0.5 * 2**-24 * (x.abs() @ weight.abs().T).max()
    assert torch.equal(x, before[0]) and torch.equal(weight, before[1])


def test_logits_of_a_long_prompt_through_onednn(smollm2, monkeypatch):
    """What is sampled from is within 1e-4 of transformers; over all positions the bound is wider, as in `test_model_plans`."""
    monkeypatch.setattr("runtime.torch_tp.model.product_for", lambda device, dtype: onednn_product)
    checkpoint, ids = open_checkpoint(smollm2), [(7919 * index * index + 13) % 40_000 + 100 for index in range(160)]
    expected = oracle_logits(loaded(smollm2), ids)
    for shares in ([1.0], [2.0, 1.0]):
        ranks = Ranks(checkpoint, len(shares))
        ranks.use_plan(layer_plans(checkpoint.config.to_spec(), shares, version=1))
        ranks.allocate(0, 1, 200)
        found = ranks.logits_of(0, 1, ids, [96])
        assert (found[-1] - expected[-1]).abs().max() <= 1e-4
        assert (found - expected).abs().max() <= 1.8e-4


def test_other_devices_and_types_are_multiplied_by_torch():
    assert product_for(torch.device("cpu"), torch.bfloat16) is torch.nn.functional.linear
    assert product_for(torch.device("meta"), torch.float32) is torch.nn.functional.linear
