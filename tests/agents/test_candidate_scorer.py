"""Networks: order and number of candidates, padding, masks, the starting point, the frozen scaling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy_env import CONTEXT, FEATURES, toy_spaces

from agents.policies.candidate_policy import CandidatePolicy, GuardedAdam, NonFiniteTraining
from agents.policies.candidate_scorer import CandidateScorer, ObservationNormaliser, ValueNet


def random_weights(module: torch.nn.Module, seed: int = 3, scale: float = 0.5) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def random_inputs(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(1, count)
    mask[0, 1] = 0.0
    return torch.randn(1, count, 4, generator=generator), torch.randn(1, 3, generator=generator), mask


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_scores_follow_a_permutation_of_candidates(activation):
    scorer = CandidateScorer(4, 3, activation=activation)
    random_weights(scorer)
    candidates, context, mask = random_inputs(9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    expected = scorer(candidates, context, mask)[:, order]
    assert torch.allclose(scorer(candidates[:, order], context, mask[:, order]), expected, atol=1e-5)


def test_values_ignore_the_order_of_candidates():
    value = ValueNet(4, 3)
    random_weights(value)
    candidates, context, mask = random_inputs(9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(value(candidates[:, order], context, mask[:, order]), value(candidates, context, mask), atol=1e-5)


def test_masked_rows_change_nothing():
    """What stands in a row with mask 0 must not reach the other scores or the value."""
    scorer, value = CandidateScorer(4, 3), ValueNet(4, 3)
    random_weights(scorer)
    random_weights(value)
    candidates, context, mask = random_inputs(5)
    garbage = candidates.clone()
    garbage[0, 1] = 1e3
    allowed = mask[0] > 0.5
    assert torch.equal(scorer(candidates, context, mask)[0, allowed], scorer(garbage, context, mask)[0, allowed])
    assert torch.equal(value(candidates, context, mask), value(garbage, context, mask))


def test_any_number_of_candidates_and_an_empty_mask():
    scorer = CandidateScorer(4, 3)
    random_weights(scorer)
    for count in (2, 16, 300):
        assert scorer(*random_inputs(count)).shape == (1, count)
    candidates, context, mask = random_inputs(3)
    assert torch.isfinite(scorer(candidates, context, torch.zeros_like(mask))).all()


def test_start_is_uniform():
    scorer = CandidateScorer(4, 3)
    assert torch.equal(scorer(*random_inputs(6)), torch.zeros(1, 6))


def test_normaliser_by_hand_and_frozen():
    """Rows 1, 3 (allowed) and 99 (masked): mean 2, standard deviation 1; a constant feature keeps scale 1."""
    normaliser = ObservationNormaliser(2, 1, clip=1.5)
    candidates = np.array([[[1.0, 7.0], [3.0, 7.0], [99.0, 99.0]]], dtype=np.float32)
    normaliser.fit(candidates, np.array([[4.0]], dtype=np.float32), np.array([[1.0, 1.0, 0.0]]))
    scaled, context = normaliser(torch.tensor([[[2.0, 8.0], [50.0, 7.0]]]), torch.tensor([[4.5]]))
    assert scaled.tolist() == [[[0.0, 1.0], [1.5, 0.0]]]
    assert context.tolist() == [[0.5]]
    assert normaliser.candidate_high.tolist() == [3.0, 7.0]
    with pytest.raises(RuntimeError, match="frozen"):
        normaliser.fit(candidates, np.array([[4.0]], dtype=np.float32), np.array([[1.0, 1.0, 0.0]]))


def make_policy(candidates_max: int = 6) -> CandidatePolicy:
    observation_space, action_space = toy_spaces(candidates_max)
    policy = CandidatePolicy(observation_space, action_space, lambda _: 1e-3)
    random_weights(policy.scorer)
    random_weights(policy.value_network)
    return policy


@pytest.mark.fault("K02")
def test_a_million_draws_are_all_legal():
    """Random masks over 24 candidates, sampled and greedy, with the allowed candidates scored far below the others."""
    policy = make_policy(24)
    rng = np.random.default_rng(5)
    for _ in range(10):
        mask = rng.random((100_000, 24)) < 0.1
        mask[np.arange(100_000), rng.integers(0, 24, 100_000)] = True
        scores = torch.from_numpy(np.where(mask, -60.0, 30.0 * rng.random((1, 24))).astype(np.float32))
        distribution = policy.action_dist.proba_distribution(scores)
        distribution.apply_masking(mask)
        for actions in (distribution.sample(), distribution.mode()):
            assert mask[np.arange(100_000), actions.numpy()].all()


def test_sampling_follows_the_softmax():
    """Scores log(1), log(2), log(7), one masked: 10 %, 20 %, 70 %; 40,000 draws, four standard errors."""
    policy = make_policy(4)
    torch.manual_seed(0)
    distribution = policy.action_dist.proba_distribution(torch.log(torch.tensor([[1.0, 2.0, 7.0, 50.0]])).repeat(40_000, 1))
    distribution.apply_masking(np.tile([True, True, True, False], (40_000, 1)))
    share = np.bincount(distribution.sample().numpy(), minlength=4) / 40_000
    assert share == pytest.approx([0.1, 0.2, 0.7, 0.0], abs=0.0092)


def test_observation_mask_holds_when_none_is_given():
    policy = make_policy()
    observation = {
        "candidates": np.zeros((6, FEATURES), np.float32),
        "context": np.zeros(CONTEXT, np.float32),
        "mask": np.array([0, 0, 0, 1, 0, 0], np.float32),
    }
    assert policy.act(observation) == 3
    batch = {key: torch.from_numpy(value).repeat(50, *[1] * value.ndim) for key, value in observation.items()}
    assert set(policy(batch)[0].tolist()) == {3}


def test_actor_and_critic_share_no_weights():
    policy = make_policy()
    observation = {
        "candidates": torch.randn(8, 6, FEATURES, generator=torch.Generator().manual_seed(0)),
        "context": torch.zeros(8, CONTEXT),
        "mask": torch.ones(8, 6),
    }
    policy.predict_values(observation).sum().backward()
    assert all(parameter.grad is None for parameter in policy.scorer.parameters())


@pytest.mark.fault("K01")
def test_optimizer_refuses_a_gradient_that_is_not_a_number():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = GuardedAdam([{"params": [weight], "role": "actor", "max_grad_norm": 0.5}], lr=0.1)
    weight.grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(NonFiniteTraining, match="gradient of the actor"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]


def test_spaces_that_do_not_fit_are_named():
    observation_space, _ = toy_spaces(6)
    _, action_space = toy_spaces(5)
    with pytest.raises(ValueError, match=r"padded to 6.*5 actions"):
        CandidatePolicy(observation_space, action_space, lambda _: 1e-3)
