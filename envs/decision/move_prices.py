"""What it costs to let a running request go on in another group: its KV copied over the link, or computed again there."""

from __future__ import annotations

from envs.domain.plans import TpGroup
from envs.group_kernel import layout as L
from envs.perf_model.step_time import step_parts


def copy_s(group: TpGroup, kv_tokens: int, transfers: int = 0) -> float:
    """Seconds to copy the KV of `kv_tokens` out of `group`; `transfers` that are under way share the link."""
    link = group.outer_link
    return link.alpha_s + kv_tokens * group.model.kv_bytes_per_token * link.beta_s_per_byte * (1 + transfers)


def recompute_s(state: L.KernelState, target: int, kv_tokens: int) -> float:
    """Seconds in which group `target` would prefill `kv_tokens` tokens by itself, by the schedulers' own model (predicted side of
    `state`)."""
    plan = int(state.group_int[target, L.GI_PLAN])
    tokens, pairs = [0, 0], [0.0, 0.0]
    tokens[plan], pairs[plan] = kv_tokens, 0.5 * kv_tokens * kv_tokens
    model = (state.predicted_rank_cost, state.predicted_group_cost, state.plain_residual, state.plain_slow)
    return float(sum(step_parts(target, *model, *tokens, *pairs, 0, 0, 0, 0, 1)[:4]))
