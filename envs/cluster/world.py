"""What one simulated world consists of: cluster, traffic, faults, seed and the options of the model."""

from __future__ import annotations

from dataclasses import dataclass, field

from envs.cluster.faults import FaultEvent, FaultRates
from envs.scenario.cluster_spec import ClusterSpec
from envs.traces.trace_table import TraceTable


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """Model options. Times in seconds, tokens in tokens.

    interference_sigma: spread of a hidden slow-down per group that wanders (log-normal, redrawn every
    interference_period_s); with use_residual_tables it makes the world differ structurally from the
    schedulers' roofline. limit_multiplier scales the class limits (DESIGN section 8). report_period_s, report_noise: how
    often ranks report their step times, and the scatter (log-normal) of what they report. report_delay_s: reports of groups
    are so much older than the snapshot that shows them; what we have in flight ourselves is always known.
    class_timeout_fraction: share of a class's requests that may time out before the class is refused for a while; one has
    timed out when it failed, or its first token came later than class_timeout_limits x its TTFT limit.
    """

    use_residual_tables: bool = True
    interference_sigma: float = 0.08
    interference_period_s: float = 20.0
    report_period_s: float = 1.0
    report_noise: float = 0.03
    report_delay_s: float = 0.0
    class_timeout_fraction: float = 0.8
    class_timeout_limits: float = 10.0
    chunk_tokens_max: int = 2048
    chunk_tokens_min: int = 256
    batch_min: int = 8
    tpot_margin: float = 0.9
    preemption_limit: int = 32
    return_s: float = 0.002
    queue_timeout_s: float = 120.0
    head_start_s: float = 2.0
    hold_max_s: float = 1.0
    control_tick_s: float = 5.0
    drain_s: float = 180.0
    limit_multiplier: float = 1.0
    memory_fraction: float = 0.9
    cold_start_s: float = 30.0
    rebuild_s: float = 2.0
    attempts_max: int = 3
    stall_events: int = 200_000  # a run whose clock and completions stand still for so many events is stopped (K09)
    start_corner: str = "planner"

    def __post_init__(self) -> None:
        if not 0.0 <= self.report_delay_s < 60.0:
            raise ValueError(f"WorldOptions: report_delay_s={self.report_delay_s} must be in [0, 60) seconds")
        if not 0.0 < self.class_timeout_fraction <= 1.0 or not self.class_timeout_limits >= 1.0:
            raise ValueError(
                f"WorldOptions: class_timeout_fraction={self.class_timeout_fraction} must be in (0, 1] and "
                f"class_timeout_limits={self.class_timeout_limits} at least 1"
            )


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
