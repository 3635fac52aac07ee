"""Limits and habits of the dispatcher and of who keeps its groups up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agents.heuristics import ROUTERS
from envs.domain.requests import CLASS_INDEX, SERVICE_CLASSES
from envs.domain.suggestions import unknown_name
from envs.scenario.scenario_error import shown
from runtime.setting_bounds import Bounds, check_bounds

FIXED = ("limit_multiplier", "head_start_s", "class_timeout_fraction", "class_timeout_limits")
"""Settings that hold for the life of a dispatcher: what it has learnt and queued rests on them."""
NUMBER_MAX = 1_000_000
WAIT_S: Bounds = (0.0, 1e7)
MULTIPLE: Bounds = (0.0, 1e7)
BOUNDS: Mapping[str, Bounds] = {
    "in_flight_max": (1, 1_000_000), "hold_max_s": WAIT_S, "attempts_max": (1, 1000), "retry_wait_s": WAIT_S, "first_token_floor_s": WAIT_S,
    "first_token_multiple": MULTIPLE, "silence_multiple": MULTIPLE, "silence_slack_s": WAIT_S, "silence_alone_s": WAIT_S,
    "report_period_s": (0.001, 60.0), "restart_s": (0.001, 3600.0), "restart_max_s": (0.001, 3600.0), "limit_multiplier": (0.001, 1e6),
    "head_start_s": WAIT_S, "class_timeout_fraction": (0.001, 1.0), "class_timeout_limits": (0.001, 1e7), "ready_within_s": (0.01, 60.0),
    "degrade_above": (0.0, 1e6),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Limits and habits; times in s.

    in_flight_max: calls inside, held ones included. hold_max_s: longest wait for a group to take a call. attempts_max: of one call, those
    that went well before their group was lost (8 pieces) or fell silent left out; attempts_by_class: of the classes named in it instead.
    retry_wait_s: how long a retry waits for the budget, and at least how long a begun answer waits for a group. first_token_floor_s,
    first_token_multiple: an attempt without a first token is given up after max(floor, multiple x predicted),
    silence_multiple, silence_slack_s: a started stream after multiple x its group's median gap + slack;
    both only after silence_alone_s where no other group could take the call and its own reports that it has it in
    hand. report_period_s: how often groups are asked for their reports. ready_within_s: a token so young proves that tokens can be made,
    and a probe gets as long. restart_s: first wait before a group that did not start, or died within 5 s of its start, is started again,
    doubled up to restart_max_s. class_timeout_fraction, class_timeout_limits: as in the simulated world. sheds_overload: turn calls away
    by priority while not all can be served in time. degrade_max_tokens: by class, what an answer may have while the pressure
    (`envs.decision.overload`) is above degrade_above; classes that are not named stay whole.
    """

    in_flight_max: int = 4096
    hold_max_s: float = 2.0
    attempts_max: int = 4
    attempts_by_class: Mapping[str, int] = field(default_factory=lambda: {"code": 6})
    retry_wait_s: float = 10.0
    first_token_floor_s: float = 5.0
    first_token_multiple: float = 5.0
    silence_multiple: float = 3.0
    silence_slack_s: float = 1.5
    silence_alone_s: float = 30.0
    report_period_s: float = 0.1
    restart_s: float = 0.5
    restart_max_s: float = 30.0
    heuristic: str = "net_utility"
    limit_multiplier: float = 1.0
    head_start_s: float = 2.0
    class_timeout_fraction: float = 0.8
    class_timeout_limits: float = 10.0
    ready_within_s: float = 1.4
    sheds_overload: bool = False
    degrade_max_tokens: Mapping[str, int] = field(default_factory=dict)
    degrade_above: float = 0.5

    def __post_init__(self) -> None:
        check_bounds(self, BOUNDS)
        if self.heuristic not in ROUTERS:
            raise ValueError(unknown_name("heuristic", self.heuristic, ROUTERS))
        for key in ("attempts_by_class", "degrade_max_tokens"):
            for name, value in getattr(self, key).items():
                if name not in CLASS_INDEX:
                    raise ValueError(f"{key}: {unknown_name('service class', str(name), CLASS_INDEX)}")
                if type(value) is not int or not 1 <= value <= NUMBER_MAX:
                    raise ValueError(f"{key}.{name}={shown(value)} must be a whole number within 1 to {NUMBER_MAX}")

    def attempts_of(self, class_index: int) -> int:
        """Most attempts of a call of the class."""
        return self.attempts_by_class.get(SERVICE_CLASSES[class_index].name, self.attempts_max)
