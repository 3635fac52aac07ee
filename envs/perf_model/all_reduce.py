"""Cost of one all-reduce: ring over all ranks, or reduce in each domain, exchange between domains, hand back.

Alpha-beta model (s, s/byte); pure functions in units of seconds and bytes. Which link joins whom is told by
`TpGroup`; sharing a link with other groups comes in as `scale`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from envs.domain.plans import TpGroup
from envs.domain.specs import LinkSpec
from envs.perf_model.coefficients import KernelProfile, load_profiles

IntArray = npt.NDArray[np.int64]

REFERENCE_BYTES = 256 * 1024.0
"""Size at which flat and hierarchical compete: 16 decode tokens of a hidden size of 8192 in 16 bits."""


class AllReduceCost(NamedTuple):
    """One all-reduce of b bytes takes alpha_s + beta_s_per_byte * b."""

    alpha_s: float
    beta_s_per_byte: float
    hierarchical: bool


def ring_factors(ranks: int) -> tuple[float, float]:
    """(steps, share of the message that crosses every link) of a ring all-reduce: 2(n-1) steps of 1/n each; 0 for one rank.

    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009.
    """
    steps = 2.0 * (ranks - 1)
    return steps, steps / ranks


def flat_s(message_bytes: float, ranks: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """Ring all-reduce over `ranks`, every step over all links at once; zero for a single rank."""
    steps, moved = ring_factors(ranks)
    return steps * alpha_s + moved * message_bytes * beta_s_per_byte


def hierarchical_s(
    message_bytes: float,
    domain_sizes: IntArray,
    inner_alpha_s: float,
    inner_beta_s_per_byte: float,
    outer_alpha_s: float,
    outer_beta_s_per_byte: float,
) -> float:
    """Reduce in every domain, ring exchange of one aggregate per domain, broadcast in every domain.

    Reduce and broadcast are the two halves of a ring all-reduce (reduce-scatter, all-gather), so a domain costs what
    flat_s of its own ranks costs; domains work at once and the largest is the slowest. All shards of a domain leave
    through its one outer link, so the exchange moves the whole message as one rank per domain would.

    Args: domain_sizes int array of shape (domains,), ranks per domain; the rest scalars in s, s/byte, bytes.
    """
    inside_s = flat_s(message_bytes, int(domain_sizes.max()), inner_alpha_s, inner_beta_s_per_byte)
    return inside_s + flat_s(message_bytes, len(domain_sizes), outer_alpha_s, outer_beta_s_per_byte)


def cheaper(message_bytes: float, domain_sizes: IntArray, *links: float) -> float:
    """The smaller of flat and hierarchical; `links` are the four link terms of `hierarchical_s`.

    A flat ring over several domains runs at the slower of both links: every ring step moves on all links at once. In a single
    domain the exchange costs nothing, so hierarchical is then flat over the inner link.
    """
    inner_alpha_s, inner_beta, outer_alpha_s, outer_beta = links
    ring_s = flat_s(message_bytes, int(domain_sizes.sum()), max(inner_alpha_s, outer_alpha_s), max(inner_beta, outer_beta))
    return min(ring_s, hierarchical_s(message_bytes, domain_sizes, *links))


def affine_coefficients(group: TpGroup, scale: float = 1.0, reference_bytes: float = REFERENCE_BYTES, eager: bool = False) -> AllReduceCost:
    """Coefficients of one all-reduce over all ranks of `group`: flat or hierarchical, the cheaper at `reference_bytes`.

    Where ranks of one domain are alike and joined by the very link on which their kernel profile was measured (NVLink of
    the SXM boards, PCIe of a host), the measured latency replaces 2(n-1) link latencies: vLLM's one-shot kernel needs far
    fewer steps than a ring.

    Args: scale: share of every link's bandwidth that this group gets, in (0, 1]; 0.5 when two equal groups share it.
    eager: engine without CUDA graphs, measured latencies of eager launches.
    Raises: ValueError when scale or reference_bytes is out of range.
    """
    if not 0.0 < scale <= 1.0:
        raise ValueError(f"affine_coefficients({group.name!r}): scale={scale} must lie in (0, 1]: the group's share of the link")
    if not reference_bytes > 0.0:
        raise ValueError(f"affine_coefficients({group.name!r}): reference_bytes={reference_bytes} must be positive")
    domains = group.domains
    ranks = len(group.ranks)
    if ranks == 1:
        return AllReduceCost(0.0, 0.0, False)
    inner = [_inside(group, domain, scale, eager) for domain in domains]
    # Domains work at once: the slowest latency and the slowest bandwidth bound them all, each from its own domain.
    inner_alpha_s = max(cost[0] for cost in inner)
    inner_beta = max(cost[1] for cost in inner)
    if len(domains) == 1:
        return AllReduceCost(inner_alpha_s, inner_beta, False)
    flat_alpha_s, flat_beta = _ring(ranks, _slower_link(group), scale)
    outer_alpha_s, outer_beta = _ring(len(domains), group.outer_link, scale)
    tree_alpha_s, tree_beta = inner_alpha_s + outer_alpha_s, inner_beta + outer_beta
    if tree_alpha_s + tree_beta * reference_bytes < flat_alpha_s + flat_beta * reference_bytes:
        return AllReduceCost(tree_alpha_s, tree_beta, True)
    return AllReduceCost(flat_alpha_s, flat_beta, False)


def _ring(ranks: int, link: LinkSpec, scale: float) -> tuple[float, float]:
    """flat_s as (alpha_s, beta_s_per_byte) over a link of which `scale` is ours."""
    steps, moved = ring_factors(ranks)
    return steps * link.alpha_s, moved * link.beta_s_per_byte / scale


def _slower_link(group: TpGroup) -> LinkSpec:
    inner, outer = group.inner_link, group.outer_link
    return LinkSpec(f"{inner.name}+{outer.name}", max(inner.alpha_s, outer.alpha_s), max(inner.beta_s_per_byte, outer.beta_s_per_byte))


def _inside(group: TpGroup, domain: tuple[int, ...], scale: float, eager: bool) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of an all-reduce inside one domain; zero for a domain of one rank."""
    if len(domain) == 1:
        return 0.0, 0.0
    alpha_s, beta = _ring(len(domain), group.inner_link, scale)
    measured = _measured_profile(group, domain)
    affine = None if measured is None else measured.all_reduce_affine(len(domain), eager)
    if measured is None or affine is None:
        return alpha_s, beta
    if measured.all_reduce_uses_link_bandwidth:
        return affine[0], beta
    # The declared link may be slower than the measured one (degraded, bridged); then it decides the bandwidth.
    return affine[0], max(affine[1] / scale, beta)


def _measured_profile(group: TpGroup, domain: tuple[int, ...]) -> KernelProfile | None:
    """The profile whose all-reduce was measured on just this kind of link, if all ranks of the domain share it."""
    names = {group.ranks[index].gpu.kernel_profile for index in domain}
    if len(names) != 1:
        return None
    found = load_profiles().get(names.pop())
    if found is None or not found.all_reduce_link or found.all_reduce_link != group.inner_link.name:
        return None
    return found
