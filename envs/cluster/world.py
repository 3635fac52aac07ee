"""What one simulated world consists of: cluster, traffic, faults, seed and the options of the model."""

from __future__ import annotations

from dataclasses import dataclass, field

from envs.cluster.faults import FaultEvent, FaultRates
from envs.decision.split_planner import CORNERS
from envs.domain.requests import SERVICE_CLASSES
from envs.domain.suggestions import unknown_name
from envs.group_kernel.engine_habits import EngineHabits
from envs.scenario.cluster_spec import ClusterSpec
from envs.traces.trace_table import TraceTable


@dataclass(frozen=True, slots=True)
class WorldOptions(EngineHabits):
    """Model options, those of the engines included. Times in seconds, tokens in tokens.

    interference_sigma: spread of a hidden slow-down per group that wanders (log-normal, redrawn every
    interference_period_s); with use_residual_tables it makes the world differ structurally from the
    schedulers' roofline. limit_multiplier scales the class limits (DESIGN section 8). report_period_s, report_noise: how
    often ranks report their step times, and the scatter (log-normal) of what they report. report_delay_s: reports of groups
    are so much older than the snapshot that shows them; what we have in flight ourselves is always known.
    class_timeout_fraction: share of a class's requests that may time out before the class is refused for a while; one has
    timed out when it failed, or its first token came later than class_timeout_limits x its TTFT limit. sheds_overload: refuse by
    priority while not all can be served in time, as the service does (`envs.decision.overload`).

    default_output_tokens: per class (order of SERVICE_CLASSES), the output that is set aside for a request whose row declares
    no limit: the door and the mask count it in place of the row's length, which nobody knows at arrival. It ends no answer: one
    that was recorded longer is made in full, as far as the context reaches.
    """

    use_residual_tables: bool = True
    interference_sigma: float = 0.08
    interference_period_s: float = 20.0
    report_period_s: float = 1.0
    report_noise: float = 0.03
    report_delay_s: float = 0.0
    class_timeout_fraction: float = 0.8
    class_timeout_limits: float = 10.0
    sheds_overload: bool = False
    return_s: float = 0.002
    head_start_s: float = 2.0
    hold_max_s: float = 1.0
    control_tick_s: float = 5.0
    drain_s: float = 180.0
    limit_multiplier: float = 1.0
    cold_start_s: float = 30.0
    rebuild_s: float = 2.0
    fall_back_stay_s: float = 60.0  # a group that fell back is offered its other ranks again only after so long
    attempts_max: int = 3
    stall_events: int = 200_000  # a run whose clock and completions stand still for so many events is stopped (K09)
    start_corner: str = "planner"
    default_output_tokens: tuple[int, ...] = (256, 256, 512)

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must lie between {low:g} and {high:g}")
        if self.chunk_tokens_min > self.chunk_tokens_max:
            raise ValueError(f"chunk_tokens_min={self.chunk_tokens_min} must not exceed chunk_tokens_max={self.chunk_tokens_max}")
        if self.start_corner not in CORNERS:
            raise ValueError(unknown_name("start_corner", self.start_corner, CORNERS))
        if len(self.default_output_tokens) != len(SERVICE_CLASSES) or min(self.default_output_tokens) < 1:
            names = ", ".join(service.name for service in SERVICE_CLASSES)
            raise ValueError(f"default_output_tokens={self.default_output_tokens} must be {len(SERVICE_CLASSES)} numbers >= 1: {names}")


_SECONDS = (0.0, 1e10)
_PERIOD_S = (1e-3, 1e10)  # of what comes again and again: 0 would stop the clock
_RANGES: dict[str, tuple[float, float]] = {
    "interference_sigma": (0.0, 10.0),
    "interference_period_s": _PERIOD_S,
    "chunk_tokens_max": (1, 1 << 24),
    "chunk_tokens_min": (1, 1 << 24),
    "batch_min": (1, 1 << 24),
    "tpot_margin": (1e-3, 1e3),
    "preemption_limit": (0, 1 << 24),
    "return_s": _SECONDS,
    "queue_timeout_s": _SECONDS,
    "head_start_s": _SECONDS,
    "hold_max_s": _SECONDS,
    "control_tick_s": _PERIOD_S,
    "drain_s": _PERIOD_S,
    "limit_multiplier": (1e-6, 1e6),
    "memory_fraction": (1e-6, 1.0),
    "cold_start_s": _SECONDS,
    "rebuild_s": _SECONDS,
    "fall_back_stay_s": _SECONDS,
    "attempts_max": (1, 1 << 24),
    "stall_events": (1, 1 << 40),
    "report_period_s": _PERIOD_S,
    "report_noise": (0.0, 10.0),
    "report_delay_s": (0.0, 60.0),
    "class_timeout_fraction": (1e-6, 1.0),
    "class_timeout_limits": (1.0, 1e10),
}
"""Least and largest value of each number; NaN lies in no range."""


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """One world. `trace` is already sliced, scaled and rebased to 0 s; `faults` are scripted, `fault_rates` random."""

    cluster: ClusterSpec
    trace: TraceTable
    seed: int
    options: WorldOptions = field(default_factory=WorldOptions)
    faults: tuple[FaultEvent, ...] = ()
    fault_rates: FaultRates | None = None
    name: str = "world"
