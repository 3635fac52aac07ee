"""What the service asks of a group, whatever serves it: take a call, make its pieces, report, be stopped.

A backend keeps no promise of its own about retries, deadlines or who gets what: that is the dispatcher's. What it says of itself is
taken for a report with an age; what the dispatcher has in flight it knows better.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs.domain.commands import CommandKind
from envs.domain.plans import SplitPlan, TpGroup
from runtime.backends.sent_text import SentText
from runtime.calls import Call, Piece


class BackendError(RuntimeError):
    """An attempt that did not come to its end; the subclass says whose fault that is."""


class BackendFault(BackendError):
    """The group's fault: lost connection, 5xx, a cut or garbled stream. Counts against it, and the call may go on elsewhere."""


class BackendBusy(BackendError):
    """The group says "not now" (429, 503 with Retry-After, a full queue): neutral, and honoured by a pause."""

    def __init__(self, message: str, retry_after_s: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BadCall(BackendError):
    """The caller's own mistake (4xx): no other group would do better, and no breaker moves (K24)."""

    def __init__(self, message: str, status: int = 400, reason: str = "invalid") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class GivenBack(BackendError):
    """The call leaves the group by nobody's fault (recalled, or its pool shrank): it is asked again where it goes on.

    target: the group that it shall go to if that takes it. resumed: told the group that its next token came from.
    """

    def __init__(self, message: str, target: int | None = None, resumed: Callable[[int], None] | None = None) -> None:
        super().__init__(message)
        self.target, self.resumed = target, resumed


class MoveRefused(RuntimeError):
    """A control command that cannot be carried out (now); nothing has changed."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What of an answer its caller has already, from another attempt. tokens: empty where nobody told ids. sent: its text; not changed from
    here on. pieces: how many came. waited_s: since it arrived, when this is not its first attempt: its place in the queue counts from
    then."""

    tokens: tuple[int, ...] = ()
    sent: SentText = field(default_factory=SentText)
    pieces: int = 0
    waited_s: float = 0.0


NOTHING = Begun()
OWN_GROUP_COMMANDS = frozenset(
    (
        CommandKind.SET_SPLIT, CommandKind.MIGRATE, CommandKind.SCALE_OUT, CommandKind.SCALE_IN, CommandKind.FALL_BACK,
        CommandKind.RESTORE, CommandKind.REGROUP,
    )
)  # fmt: skip
"""What a group whose engine is our own carries out."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One step as its ranks measured it: tokens computed, query-key pairs of prompt tokens, KV tokens read, and seconds per rank."""

    tokens: int
    pairs: float
    kv_tokens: int
    attention_s: tuple[float, ...]
    mlp_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CallProgress:
    """How far a call is in its group. prefill_left: prompt tokens (and lost ones) still to be computed."""

    call_id: str
    generated: int
    prefill_left: int
    is_admitted: bool


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The plan that new calls get. version: counts from the group's start. Widths per rank of the group, the mean over layers where they
    differ; 0 for ranks that are no members (lost, or left out). is_moving: another plan is being prepared."""

    version: int
    query_heads: tuple[float, ...]
    mlp_columns: tuple[float, ...]
    vocabulary_rows: tuple[int, ...]
    members: tuple[int, ...]
    is_moving: bool = False


@dataclass(frozen=True, slots=True)
class WorkReport:
    """What was done since the group's start. passes: forward passes; per rank, s: computing, and waiting for memory."""

    passes: int
    compute_s: tuple[float, ...]
    memory_stall_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SplitDone:
    """A new plan is in force. paused_s: how long nothing ran for it."""

    version: int
    paused_s: float


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What a group says of itself; None where its kind cannot tell.

    at_s: when, on this process's monotonic clock. running, waiting: requests inside, whoever sent them. step_s: the step under way (or
    the last), step_left_s: what is left of it. correction: observed / predicted step time. progress: of the calls inside, admitted ones
    in order of admission, then waiting ones in queue order. kv_used_fraction: where blocks are not told.
    """

    at_s: float
    running: int
    waiting: int
    kv_blocks_free: int | None = None
    kv_blocks_total: int | None = None
    kv_used_fraction: float | None = None
    step_s: float = 0.0
    step_left_s: float = 0.0
    correction: float | None = None
    pause_left_s: float = 0.0
    rank_times: RankTimes | None = None
    progress: tuple[CallProgress, ...] | None = None
    plan: PlanReport | None = None
    work: WorkReport | None = None


@dataclass(frozen=True, slots=True)
class KvPart:
    """KV of a running call on its way to another group. tokens: whose KV is there so far; kv_bytes, seconds: what this part of it took.
    place: where the group that takes it finds it, in its kind's own words."""

    tokens: int
    kv_bytes: int
    seconds: float
    place: Any


class Backend(Protocol):
    """One group. All methods belong to the event loop and none of them blocks it."""

    name: str
    group_index: int
    is_emulation: bool
    can: frozenset[CommandKind]  # control commands that it carries out; requeueing needs nothing of it
    kv_home: str | None  # groups with the same one can hand each other the KV of calls; None: it neither gives nor takes any
    keeps_prefixes: bool  # whether a prompt whose beginning it has computed before costs it less, as far as we can tell

    async def start(self) -> None:
        """Until it can serve. Raises: BackendFault."""

    async def close(self) -> None:
        """Nothing is left behind; open calls end with BackendFault. May be called twice."""

    def submit(self, call: Call, begun: Begun = NOTHING) -> AsyncIterator[Piece]:
        """The pieces of the answer after `begun`, the last one with a finish reason. Closing the iterator (or cancelling whoever waits in
        it) ends the work at once and frees its KV. Raises, while iterated: BackendFault, BackendBusy, BadCall."""

    def continues(self, call: Call, begun: Begun) -> bool:
        """Whether `submit(call, begun)` would go on exactly as the answer would have gone on where it began."""

    def report(self) -> GroupReport | None:
        """The latest; None if never."""

    @property
    def is_alive(self) -> bool:
        """False when the process is known to be gone; True says nothing about whether tokens come."""

    async def probe(self) -> bool:
        """Whether a token can really be made now (K22); no longer than a few seconds."""

    async def set_split(self, plan: SplitPlan) -> SplitDone:
        """Let new calls get `plan`, whose widths count as shares; those inside go on. Returns when it is in force. Raises: MoveRefused."""

    def why_not_join(self, donor: Backend) -> str:
        """Why this group could not be started with the ranks of `donor` behind its own; "" where it could."""

    def join(self, donor: Backend, merged: TpGroup) -> Callable[[], None]:
        """Not while either runs: from its next start on this group is `merged`, with the donor's ranks behind its own. Returns what
        makes it the old one again."""

    async def give_kv(self, call_id: str, after: int) -> KvPart:
        """Copy the KV of a running call, from token `after` on, to where another group of the same `kv_home` can take it; the call runs on.
        Raises: MoveRefused."""

    async def take_kv(self, part: KvPart) -> None:
        """Have it ready for the call, which then begins with it if it is submitted here; until then it may be given up for want of room.
        Raises: MoveRefused."""
