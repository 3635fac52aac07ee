"""Adapter: the candidate networks as a policy of sb3-contrib's MaskablePPO. Knows the observation's three parts
(`candidates`, `context`, `mask`); the arithmetic is in `candidate_scorer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.distributions import MaskableCategorical, MaskableCategoricalDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn
from torch.nn import functional

from agents.policies.candidate_scorer import ACTIVATIONS, CandidateScorer, ObservationNormaliser, ValueNet
from agents.policy_bundle import TIE_TOLERANCE


class NonFiniteTraining(RuntimeError):
    """A reward, gradient or weight is not a number. Training stops; the last good checkpoint stays."""


class GuardedAdam(torch.optim.Adam):
    """Adam that refuses a non-finite gradient and clips actor and critic apart, so that large returns in the critic's
    gradient do not scale the actor's to nothing."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
            if not gradients:
                continue
            norm = torch.nn.utils.get_total_norm(gradients)
            if not torch.isfinite(norm):
                raise NonFiniteTraining(
                    f"gradient of the {group['role']} is {norm.item()}; look for non-finite rewards or observations, or lower learning_rate"
                )
            factor = min(1.0, group["max_grad_norm"] / (float(norm) + 1e-6))
            for gradient in gradients:
                gradient.mul_(factor)
        super().step(closure)


class ExactMaskedDistribution(MaskableCategoricalDistribution):
    """Masked choice that cannot draw a masked candidate: Gumbel-max over -inf logits, and a stated greedy rule.

    torch's multinomial in float32 has been seen to return an option of probability zero about once in 45,000 draws,
    and its own sanity check to fail on wide distributions (fault K02); neither can happen here.
    """

    _scores: Tensor

    def proba_distribution(self, action_logits: Tensor) -> ExactMaskedDistribution:
        self._scores = action_logits.view(-1, self.action_dim)
        self.distribution = MaskableCategorical(logits=self._scores, validate_args=False)
        return self

    def _legal_scores(self) -> Tensor:
        if self.distribution.masks is None:
            return self._scores
        return self._scores.masked_fill(~self.distribution.masks, -torch.inf)

    def sample(self) -> Tensor:
        scores = self._legal_scores()
        noise = torch.rand_like(scores).clamp_(min=torch.finfo(scores.dtype).tiny, max=1.0 - 1e-7)
        return (scores - torch.log(-torch.log(noise))).argmax(dim=1)

    def mode(self) -> Tensor:
        """Lowest index among the scores within TIE_TOLERANCE of the best: the same rule as `BundlePolicy.choose`."""
        scores = self._legal_scores()
        near_best = scores >= scores.amax(dim=1, keepdim=True) - TIE_TOLERANCE
        index = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
        return index.masked_fill(~near_best, scores.shape[1]).amin(dim=1)


class _NoExtractor(BaseFeaturesExtractor):
    """The networks read the observation's parts themselves."""

    def __init__(self, observation_space: spaces.Space) -> None:
        super().__init__(observation_space, features_dim=1)


def _check_spaces(observation_space: spaces.Space, action_space: spaces.Space) -> tuple[int, int, int]:
    """Return (candidates at most, candidate features, context features) or say what is wrong with the spaces."""
    if not isinstance(observation_space, spaces.Dict) or set(observation_space.spaces) != {"candidates", "context", "mask"}:
        raise ValueError(f"observation space must be a Dict of candidates, context and mask; got {observation_space}")
    if not isinstance(action_space, spaces.Discrete):
        raise ValueError(f"action space must be Discrete(candidates at most); got {action_space}")
    candidates_max, features = observation_space["candidates"].shape  # type: ignore[misc]
    (context,) = observation_space["context"].shape  # type: ignore[misc]
    if observation_space["mask"].shape != (candidates_max,) or action_space.n != candidates_max:
        raise ValueError(
            f"candidates are padded to {candidates_max}, but mask has shape {observation_space['mask'].shape} "
            f"and there are {action_space.n} actions; all three must agree"
        )
    return candidates_max, features, context


class CandidatePolicy(MaskableActorCriticPolicy):
    """Scorer and value network behind one frozen scaling. No layer is shared between actor and critic.

    Observation: `candidates` (C_max, F), `context` (K,), `mask` (C_max,), float32. Values are in units of
    `return_scale` (a buffer, 1 unless training sets it).
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Callable[[float], float],
        hidden: int = 64,
        activation: str = "tanh",
        observation_clip: float = 5.0,
        max_grad_norm: float = 0.5,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f'activation "{activation}" unknown; known: {", ".join(sorted(ACTIVATIONS))}')
        self.hidden, self.activation = hidden, activation
        self.observation_clip, self.max_grad_norm = observation_clip, max_grad_norm
        self.candidates_max, self.features, self.context_features = _check_spaces(observation_space, action_space)
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=[],
            features_extractor_class=_NoExtractor,
            optimizer_class=GuardedAdam,
            optimizer_kwargs={"eps": 1e-5},
        )

    def _build(self, lr_schedule: Callable[[float], float]) -> None:
        self.action_dist = ExactMaskedDistribution(self.candidates_max)
        self.normaliser = ObservationNormaliser(self.features, self.context_features, self.observation_clip)
        self.scorer = CandidateScorer(self.features, self.context_features, self.hidden, self.activation)
        self.value_network = ValueNet(self.features, self.context_features, self.hidden, self.activation)
        self.register_buffer("return_scale", torch.tensor(1.0))
        self.optimizer = self.make_optimizer(lr_schedule(1.0))

    def make_optimizer(self, learning_rate: float) -> GuardedAdam:
        groups = [
            {"params": list(self.scorer.parameters()), "role": "actor", "max_grad_norm": self.max_grad_norm},
            {"params": list(self.value_network.parameters()), "role": "critic", "max_grad_norm": self.max_grad_norm},
        ]
        return GuardedAdam(groups, lr=learning_rate, eps=1e-5)

    def _scaled(self, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled candidates, scaled context, mask; padding that no state of the batch uses is cut off."""
        mask = obs["mask"].float()
        used = mask.amax(dim=0).nonzero()
        width = int(used[-1]) + 1 if len(used) else 1
        candidates, context = self.normaliser(obs["candidates"][:, :width].float(), obs["context"].float())
        return candidates, context, mask[:, :width]

    def _scores_of(self, scaled: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        scores = self.scorer(*scaled)
        return functional.pad(scores, (0, self.candidates_max - scores.shape[1]))

    def scores(self, obs: dict[str, Tensor]) -> Tensor:
        """Logits (B, C_max), unmasked; padding that no state of the batch uses has logit 0."""
        return self._scores_of(self._scaled(obs))

    def forward(self, obs: Any, deterministic: bool = False, action_masks: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        scaled = self._scaled(obs)
        distribution = self.action_dist.proba_distribution(self._scores_of(scaled))
        distribution.apply_masking(obs["mask"] > 0.5 if action_masks is None else action_masks)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, self.value_network(*scaled), distribution.log_prob(actions)

    def evaluate_actions(self, obs: Any, actions: Tensor, action_masks: Any = None) -> tuple[Tensor, Tensor, Tensor | None]:
        scaled = self._scaled(obs)
        distribution = self.action_dist.proba_distribution(self._scores_of(scaled))
        distribution.apply_masking(obs["mask"] > 0.5 if action_masks is None else action_masks)
        return self.value_network(*scaled), distribution.log_prob(actions), distribution.entropy()

    def get_distribution(self, obs: Any, action_masks: Any = None) -> ExactMaskedDistribution:
        """Distribution over candidates. Without `action_masks` the observation's own mask holds: it cannot be forgotten."""
        distribution = self.action_dist.proba_distribution(self.scores(obs))
        distribution.apply_masking(obs["mask"] > 0.5 if action_masks is None else action_masks)
        return distribution

    def predict_values(self, obs: Any) -> Tensor:
        return self.value_network(*self._scaled(obs))

    def act(self, observation: dict[str, np.ndarray]) -> int:
        """Greedy choice for one observation (unbatched arrays)."""
        batch = {key: torch.from_numpy(np.asarray(value, dtype=np.float32)).unsqueeze(0) for key, value in observation.items()}
        with torch.no_grad():
            return int(self.get_distribution(batch).mode()[0])

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
            "hidden": self.hidden,
            "activation": self.activation,
            "observation_clip": self.observation_clip,
            "max_grad_norm": self.max_grad_norm,
        }


def require_finite(named: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Raise NonFiniteTraining naming the first tensor with a non-finite number."""
    for name, tensor in named:
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteTraining(f"{what} {name} is not finite; nothing was saved from this update, the last good checkpoint stays")


def parameters_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Trainable weights by name (buffers such as unseen ranges may hold infinities on purpose)."""
    return module.named_parameters()
