"""Who meets the candidate, and when: a share of users and sessions, in time slices that alternate with the incumbent's.

Arms share queues, so calls side by side say nothing about the arms: slices do. They come in pairs, each pair's order drawn anew; a pair's
difference is one value for the test. A user or session keeps its arm (`sticky_s`); its calls in the other arm's slices, and calls in a
slice's first `washout_s`, are served like any other and not compared. Nothing is copied: each call is served, billed and counted once.
Who keeps which arm outlives a restart (`kept`, `remember`).
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from envs.decision.objective import value_of
from envs.domain.requests import SERVICE_CLASSES, Ended, OutcomeKind
from runtime.calls import REFUSAL_STATUS, Call
from runtime.rollout.settings import RolloutEntry
from runtime.scheduling.call_ledger import DONE, LEFT, CallAccount

CANDIDATE, INCUMBENT, OUTSIDE = "candidate", "incumbent", ""
ARMS = (INCUMBENT, CANDIDATE)
KEPT_MAX = 20_000
"""Users and sessions whose arm is remembered; the longest silent is forgotten first."""
LINGER_S = 120.0
"""A pair waits so long for its calls to end; what runs on is left out."""


@dataclass(slots=True)
class ArmSums:
    """Compared calls of one arm in one pair of slices. met: of weight. served: calls that were not refused or lost."""

    calls: int = 0
    served: int = 0
    weight: float = 0.0
    met: float = 0.0

    @property
    def goodput(self) -> float:
        return self.met / self.weight

    @property
    def served_share(self) -> float:
        return self.served / self.calls


@dataclass(slots=True)
class SlicePair:
    """number: of the rollout. ends_s: of its second slice. open: its calls under way."""

    number: int
    begins_s: float
    ends_s: float
    open: int = 0
    sums: dict[str, ArmSums] = field(default_factory=lambda: {arm: ArmSums() for arm in ARMS})


class Switchback:
    """Arms of one canary stage. `begin_s`: on the clock of accounts; `first_pair`: pairs that the rollout has had before.

    on_pair: told each pair that is over, in order of their ends. on_call: told arm, whether it was served, and whether it counts.
    """

    def __init__(
        self, settings: RolloutEntry, share: float, salt: str, begin_s: float, first_pair: int, limit_multiplier: float,
        now_s: Callable[[], float], before: Switchback | None = None,
    ) -> None:  # fmt: skip
        """before: of the stage before, whose users and sessions keep their arms."""
        self._settings, self._share, self._salt, self._begin_s, self._first = settings, share, salt, begin_s, first_pair
        self._multiplier, self._now_s = limit_multiplier, now_s
        self._kept: OrderedDict[int, tuple[str, float]] = OrderedDict() if before is None else before._kept
        self._pairs: OrderedDict[int, SlicePair] = OrderedDict()

    # --- who ------------------------------------------------------------------------------------------------------------------

    def arm_of(self, call: Call, now_s: float) -> str:
        """The arm that decides for `call`, which arrives at `now_s`, its account's arrival; "" for those outside, whom the incumbent
        serves and nobody compares."""
        key = self._number(call.user or call.session or call.call_id)
        if key / 2**64 >= self._share:
            return OUTSIDE
        pair = self._pair_at(now_s)
        pair.open += 1
        arm = self.slice_arm(now_s)
        if call.user is None and call.session is None:
            return arm
        kept = self._kept.get(key)
        if kept is not None and now_s - kept[1] <= self._settings.sticky_s:
            arm = kept[0]
        self._kept[key] = arm, now_s
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return arm

    def kept(self) -> list[tuple[int, str, float]]:
        """(key, arm, seconds since its last call) of every user and session, the longest silent first."""
        now_s = self._now_s()
        return [(key, arm, now_s - seen_s) for key, (arm, seen_s) in self._kept.items()]

    def remember(self, kept: Iterable[tuple[int, str, float]]) -> None:
        """What `kept` said before a restart, seconds that have passed since included. One that was met since keeps what it got."""
        now_s, met = self._now_s(), self._kept
        self._kept = OrderedDict((key, (arm, now_s - max(0.0, silent_s))) for key, arm, silent_s in kept if arm in ARMS and key not in met)
        self._kept.update(met)
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def _number(self, key: str) -> int:
        """64 bits; who meets the candidate at 1 % also does at 10 %."""
        return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8, key=self._salt.encode()).digest(), "little")

    # --- when -----------------------------------------------------------------------------------------------------------------

    def slice_arm(self, at_s: float) -> str:
        """Whose slice it is."""
        place = self._place(at_s)
        is_candidate_first = self._number(f"pair {self._first + place // 2}") % 2 == 0
        return CANDIDATE if (place % 2 == 0) == is_candidate_first else INCUMBENT

    def current_arm(self) -> str:
        return self.slice_arm(self._now_s())

    @property
    def pairs_begun(self) -> int:
        return self._first + self._place(self._now_s()) // 2 + 1

    def next_switch_s(self) -> float:
        """Seconds until the next slice."""
        slice_s = self._settings.slice_s
        return slice_s - (self._now_s() - self._begin_s) % slice_s

    def _place(self, at_s: float) -> int:
        return max(0, math.floor((at_s - self._begin_s) / self._settings.slice_s))

    def _pair_at(self, at_s: float) -> SlicePair:
        index = self._place(at_s) // 2
        pair = self._pairs.get(index)
        if pair is None:
            begins_s = self._begin_s + 2 * index * self._settings.slice_s
            pair = self._pairs[index] = SlicePair(self._first + index, begins_s, begins_s + 2 * self._settings.slice_s)
        return pair

    # --- what came of it ------------------------------------------------------------------------------------------------------

    def call_ended(self, account: CallAccount) -> None:
        """Count a call whose arm this gave; one of an earlier stage counts no more."""
        if account.arrival_s < self._begin_s:
            return
        pair = self._pairs.get(self._place(account.arrival_s) // 2)
        if pair is None:  # its pair was closed without it
            return
        pair.open -= 1
        if not counts(account) or account.arm != self.slice_arm(account.arrival_s):
            return
        if (account.arrival_s - self._begin_s) % self._settings.slice_s < self._settings.washout_s:
            return
        service, sums = SERVICE_CLASSES[account.call.class_index], pair.sums[account.arm]
        sums.calls += 1
        sums.served += account.end == DONE
        sums.weight += service.weight
        sums.met += service.weight * is_met(account, self._multiplier)

    def pairs_over(self) -> list[SlicePair]:
        """Pairs whose slices and calls are over since this was last asked."""
        now_s, over = self._now_s(), []
        for index, pair in list(self._pairs.items()):
            if now_s >= pair.ends_s and (pair.open <= 0 or now_s >= pair.ends_s + LINGER_S):
                over.append(self._pairs.pop(index))
        return over


def counts(account: CallAccount) -> bool:
    """Whether a call says anything about who decided: not one whose caller left, nor one that the caller must change."""
    return account.end != LEFT and REFUSAL_STATUS.get(account.end, 500) not in (400, 404)


def is_met(account: CallAccount, limit_multiplier: float) -> bool:
    """Whether the call was served within every limit of its class, by the objective's own rule."""
    if account.end != DONE:
        return False
    call = account.call
    ended = Ended(
        call.class_index, int(OutcomeKind.COMPLETED), account.arrival_s, account.first_s, account.last_s, call.prompt_tokens, account.tokens
    )
    return value_of(ended, 3600.0, limit_multiplier) > 0.0
