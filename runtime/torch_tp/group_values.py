"""What callers of a group give and get: settings, changes of membership, and the ways in which an order can end."""

from __future__ import annotations

import re
from dataclasses import dataclass

from envs.decision.detection import FailureKind
from envs.domain.plans import LayerPlans
from envs.domain.suggestions import unknown_name
from runtime.setting_bounds import DEVICE
from runtime.torch_tp.emulation import SlowDown
from runtime.torch_tp.overlap import POLICIES


class GroupError(RuntimeError):
    """What a step or an order can end in."""


class GroupGone(GroupError):
    """No rank is left, or the supervisor is closed: nothing can be served here."""


@dataclass(frozen=True, slots=True)
class LostRank:
    """worker: its id; detail: what was seen. noticed_s: on the monotonic clock; silent_s: since its last sign of life."""

    worker: int
    kind: FailureKind
    detail: str
    noticed_s: float
    silent_s: float


@dataclass(frozen=True, slots=True)
class GroupChange:
    """A new epoch. members: worker ids in rank order; plan: the one that new requests get; keeps_kv: whether slots stay valid.

    rebuilt_s: when the group stood ready, on the monotonic clock.
    """

    epoch: int
    members: tuple[int, ...]
    lost: tuple[LostRank, ...]
    joined: tuple[int, ...]
    plan: LayerPlans
    keeps_kv: bool
    rebuilt_s: float


class GroupRebuilt(GroupError):
    """The step did not happen: the group was rebuilt, and every slot is empty. Fill them again from the token ids and go on."""

    def __init__(self, change: GroupChange, detail: str) -> None:
        super().__init__(detail)
        self.change = change


@dataclass(frozen=True, slots=True)
class RankSettings:
    """One rank. speed: relative to the others, until it is measured. node: its communication domain, "" for this host.

    slow_factor: emulates a device that many times slower than this host's core (see `emulation`). is_remote: the worker is started
    by hand on another host and joins by address and token; it is neither spawned nor killed from here, only fenced.
    """

    speed: float = 1.0
    device: str = "cpu"
    node: str = ""
    slow_factor: float = 1.0
    threads: int = 1
    is_remote: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ValueError(f"RankSettings: speed={self.speed} must be positive and finite")
        if not re.fullmatch(DEVICE, self.device):
            raise ValueError(f"RankSettings: device={self.device!r} must be cpu, cuda or cuda:N")
        if self.threads < 1:
            raise ValueError(f"RankSettings: threads={self.threads} must be at least 1")
        SlowDown(self.slow_factor)  # says what is wrong with it


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """communicator, between, wire: see `build_communicator`. buddy_kv: every rank's KV is also kept by a neighbour, so that the loss of
    one costs no second prefill: about twice the KV memory, and the neighbour's key and value projections in every step.

    overlap: when steps run in two half batches, one computing while the other's sums travel: "always", "never", or "auto", which measures
    the links of a group of several hosts at its start and tries it where their bandwidth binds (see `overlap`).

    listen_host: None serves local workers only; else remote ones may join there (port 0: chosen by the system).

    collective_deadline_s bounds one collective, step_deadline_s a whole step; both only backstops, since the watch is faster.
    """

    kv_tokens_max: int = 8192
    slots_max: int = 32
    dtype: str = "float32"
    communicator: str = "auto"
    between: str = "tcp"
    wire: str = "float32"
    buddy_kv: bool = False
    overlap: str = "auto"
    start_deadline_s: float = 180.0
    collective_deadline_s: float = 30.0
    step_deadline_s: float = 300.0
    configure_deadline_s: float = 20.0
    prepare_deadline_s: float = 60.0
    stop_deadline_s: float = 1.0
    listen_host: str | None = None
    listen_port: int = 0
    token: str | None = None

    def __post_init__(self) -> None:
        if self.overlap not in POLICIES:
            raise ValueError(unknown_name("overlap policy", self.overlap, POLICIES))
