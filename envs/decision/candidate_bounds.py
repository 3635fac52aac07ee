"""How many candidates a decision can have at most on a cluster, whatever happens in it: what a policy's padded size must hold.

Bounds, not counts: a decision seldom lists as many. Known before the first world is played, so that a cluster beyond a
policy's size is refused at once instead of in the middle of an episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

from envs.decision.actions import CORNER_COUNT, Decision
from envs.decision.move_candidates import MIGRATIONS_MAX


def candidates_max(decision: Decision, ranks: Sequence[int], parked: int) -> int:
    """Most candidates of one decision. ranks: ranks of each group; parked: groups that start switched off."""
    groups = len(ranks)
    if decision == "route":
        return groups + 2  # hold, refuse
    # a parked group's ranks may join another (REGROUP), up to the largest group's number of ranks
    may_grow = parked > 0 and max(ranks) > 1
    if decision == "split":
        return 1 + CORNER_COUNT * sum(count > 1 or may_grow for count in ranks)
    if decision == "rebalance":
        return 1 + max(_moves_max(ranks, off, parked > 0, may_grow) for off in range(groups if parked else 1))
    assert_never(decision)


def _moves_max(ranks: Sequence[int], parked_now: int, has_spares: bool, may_grow: bool) -> int:
    """Most moves while `parked_now` groups are off: those up but the target requeue and migrate, those off start or are
    given away, one may be drained, and those up with several ranks fall back or are restored."""
    up = len(ranks) - parked_now
    many = up if may_grow else min(up, sum(count > 1 for count in ranks))
    return max(0, up - 1) + min(MIGRATIONS_MAX, max(0, up - 1)) + 2 * parked_now + has_spares + many


def too_many_candidates(cluster_name: str, asked: Iterable[Decision], ranks: Sequence[int], parked: int, rows: int) -> str | None:
    """Why `rows` padded candidates are too few for the `asked` decisions on a cluster, or None."""
    most, decision = max((candidates_max(decision, ranks, parked), decision) for decision in asked)
    if most <= rows:
        return None
    return f"cluster {cluster_name!r} can list {most} candidates in a {decision} decision; raise it to {most}"
