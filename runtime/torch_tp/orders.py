"""Bodies of the messages of `protocol`: what the controller orders and what the workers report. Plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from envs.domain.plans import LayerPlans
from envs.domain.specs import ModelSpec
from runtime.torch_tp.kv_file import KvFile
from runtime.torch_tp.slot_records import SlotRecord
from runtime.torch_tp.steps import SlotTokens, StepCommand


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first words. token: the secret it was given; node: its communication domain; pid: on its own host."""

    protocol_version: int
    token: str
    worker: int
    pid: int
    node: str


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What a worker is to hold. slow_factor > 1 emulates a slower device (see `emulation`). uses_network: its groups may reach beyond
    shared memory, so that it imports what that takes before it says that it is loaded."""

    model: str
    device: str
    dtype: str
    threads: int
    kv_tokens_max: int
    slots_max: int
    slow_factor: float
    uses_network: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """memory_bytes: of the worker's device, or (is_host_memory) of its whole host."""

    seconds: float
    model: ModelSpec
    memory_bytes: int
    is_host_memory: bool


@dataclass(frozen=True, slots=True)
class Configuration:
    """One epoch's group. members: worker ids in rank order; domains: the same ids by communication domain.

    plans: live plans, oldest first; MLP and vocabulary follow the last. has_buddies: slots of plans used from now on keep a neighbour's
    KV as well; buddied: versions among `plans` whose slots do. between, wire: see `build_communicator`.
    keeps_kv: what the slots hold stays valid: the plans are the old ones, with members that `joined` at zero width, or (takes_over) with
    the heads of lost ones at their buddies. `slots` is then what whoever needs it is to know of them. Otherwise all slots are dropped.
    """

    members: tuple[int, ...]
    domains: tuple[tuple[int, ...], ...]
    communicator: str
    store_host: str
    store_port: int
    segment_names: tuple[str, ...]
    deadline_s: float
    plans: tuple[LayerPlans, ...]
    keeps_kv: bool
    between: str = "tcp"
    wire: str = "float32"
    has_buddies: bool = False
    buddied: tuple[int, ...] = ()
    takes_over: bool = False
    joined: tuple[int, ...] = ()
    slots: tuple[SlotRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Configured:
    seconds: float


@dataclass(frozen=True, slots=True)
class PrepareOrder:
    """Get ready for a switch while steps go on. plan: a new one to hold ready; None: none. moves: slots whose KV is to be copied ahead,
    to where plan version `to_version`, live already, wants it. goes_on: the copies made last are to be brought up to date instead."""

    plan: LayerPlans | None = None
    moves: tuple[int, ...] = ()
    to_version: int = 0
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """What getting ready took. moves: the slots of the order whose copies found room; the same on every rank. weight_bytes is 0 where
    ranks hold the checkpoint mapped; kv_bytes: received from other ranks."""

    moves: tuple[int, ...]
    weight_bytes: int
    kv_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SwitchOrder:
    """From the next step on: use the prepared plan (if `uses_plan`), and the copies of the slots `moves`, brought up to date first. Copies
    of other slots are dropped, as is a prepared plan that is not to be used: so an order with neither undoes a PREPARE. columns: cut MLP
    and vocabulary like this plan, which has the version and the heads of the newest; needs no PREPARE, since both are stateless."""

    uses_plan: bool = False
    moves: tuple[int, ...] = ()
    columns: LayerPlans | None = None


@dataclass(frozen=True, slots=True)
class Switched:
    """moves: slots that now lie by the new plan (not those given up or refilled since the PREPARE); the same on every rank. kv_bytes:
    received while nothing ran; seconds: the pause."""

    moves: tuple[int, ...]
    kv_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CarryOrder:
    """Beside the steps, write the KV of tokens [start, end) of a slot to `file` (gives), or fill the slot from there, within deadline_s.
    A slot that is filled belongs to no request yet; nothing but its release is ordered of it until all have answered."""

    file: KvFile
    slot: int
    start: int
    end: int
    gives: bool
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Carried:
    """kv_bytes: written or read by this rank (or all of them); error: "" where all of it was."""

    kv_bytes: int
    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class StepOrder:
    """overlaps: in two half batches."""

    command: StepCommand
    overlaps: bool


@dataclass(frozen=True, slots=True)
class StepDone:
    """tokens: from the lowest rank only. The four times sum up to the step's; memory_stall_s: waiting for
    memory, by the model's estimate, and time off the core (pages that had to be fetched, a core that was taken). busy_s: by
    `profiler.OPERATIONS`, stalls included."""

    tokens: tuple[SlotTokens, ...]
    compute_s: float
    memory_stall_s: float
    communication_s: float
    host_s: float
    busy_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ReduceOrder:
    """Time all-reduces of these sizes."""

    sizes_bytes: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class Failure:
    """`of`: the kind of message that failed. is_peer: the cause is another rank (lost, or silent beyond the deadline)."""

    of: int
    is_peer: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Signs of life of a worker that shares no page with the controller."""

    progress: int
    beat: int
    phase: int
