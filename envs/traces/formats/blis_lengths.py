"""Length distributions of inference-sim (BLIS) workloads. Source: inference-sim docs/reference/workload-spec.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envs.domain.suggestions import unknown_name
from envs.traces.trace_row import TraceError

FloatArray = npt.NDArray[np.float64]
NEEDED: dict[str, tuple[str, ...]] = {
    "gaussian": ("mean", "std_dev"),
    "exponential": ("mean",),
    "pareto_lognormal": ("alpha", "xm", "mu", "sigma", "mix_weight"),
    "lognormal": ("mu", "sigma"),
    "constant": ("value",),
    "empirical": (),
}


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Token lengths; draws are rounded, at least 1, and held inside min and max where those are given."""

    kind: str
    parameters: Mapping[str, float]

    def draw(self, size: int, rng: np.random.Generator) -> FloatArray:
        """Draw lengths, shape (size,), whole tokens as float64."""
        p = self.parameters
        if self.kind == "gaussian":
            values = rng.normal(p["mean"], p["std_dev"], size)
        elif self.kind == "exponential":
            values = rng.exponential(p["mean"], size)
        elif self.kind == "lognormal":
            values = rng.lognormal(p["mu"], p["sigma"], size)
        elif self.kind == "pareto_lognormal":
            pareto = p["xm"] * (1.0 + rng.pareto(p["alpha"], size))
            values = np.where(rng.random(size) < p["mix_weight"], pareto, rng.lognormal(p["mu"], p["sigma"], size))
        elif self.kind == "constant":
            values = np.full(size, p["value"])
        else:
            weights = np.array(list(p.values()))
            values = rng.choice(np.array([float(key) for key in p]), size=size, p=weights / weights.sum())
        limits = (p.get("min", 1.0), p.get("max", np.inf)) if self.kind != "empirical" else (1.0, np.inf)
        return np.rint(np.clip(values, max(1.0, limits[0]), limits[1]))


def length_distribution(entry: Any, where: str) -> LengthDistribution:
    """Check one `{type, params}` of a file; raises TraceError naming `where`."""
    if not isinstance(entry, dict) or "type" not in entry:
        raise TraceError(f"{where}: expected {{type, params}}, found {entry!r}")
    kind, params = str(entry["type"]), entry.get("params") or {}
    if kind not in NEEDED:
        raise TraceError(unknown_name(f"{where}: distribution", kind, NEEDED))
    try:
        numbers = {str(key): float(value) for key, value in params.items()}
    except (TypeError, ValueError, AttributeError):
        raise TraceError(f"{where}: params of {kind} must be numbers, found {params!r}") from None
    missing = [key for key in NEEDED[kind] if key not in numbers]
    if missing or not all(np.isfinite(value) for value in numbers.values()):
        raise TraceError(f"{where}: {kind} needs finite {', '.join(NEEDED[kind])}; found {', '.join(numbers) or 'none'}")
    if kind == "empirical" and not (numbers and min(numbers.values()) >= 0 and sum(numbers.values()) > 0):
        raise TraceError(f"{where}: empirical needs token counts with probabilities")
    if any(numbers.get(key, 1.0) < 0 for key in ("std_dev", "sigma")) or any(numbers.get(key, 1.0) <= 0 for key in ("alpha", "xm")):
        raise TraceError(f"{where}: {kind} has a negative spread or a scale that is not positive: {numbers}")
    return LengthDistribution(kind, numbers)
