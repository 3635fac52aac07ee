"""Prints the held-out errors and provenance of the packaged coefficients; with --data also leaves whole units out.

python -m calibration.report [--data ../shared/calibration] [--markdown]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from calibration import measurements as M
from calibration.fit_coefficients import MEASURED, SEED, leave_one_model_out
from calibration.kernel_fits import fit_gemm, score
from envs.perf_model.coefficients import KernelProfile, load_profiles

HEADER = ("profile", "family", "rows", "mean %", "median %", "p90 %")


def error_rows(profiles: dict[str, KernelProfile]) -> list[tuple[str, ...]]:
    """One row of text per profile and family, sorted by profile then family."""
    rows = []
    for name, found in sorted(profiles.items()):
        for family, error in sorted(found.held_out_error.items()):
            numbers = (f"{100 * error[key]:.1f}" for key in ("mean", "median", "p90"))
            rows.append((name, family, f"{error['rows']:.0f}", *numbers))
    return rows


def as_table(rows: list[tuple[str, ...]], markdown: bool) -> str:
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in [HEADER, tuple("---" for _ in HEADER), *rows]]
        return "\n".join(lines)
    widths = [max(len(row[i]) for row in [HEADER, *rows]) for i in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [HEADER, *rows])


def whole_unit_rows(data: Path) -> list[tuple[str, ...]]:
    """Errors on units none of whose rows were fitted: each Vidur model in turn, and B200 from H100's coefficients."""
    rng = np.random.default_rng(SEED)
    rows = []
    for name in ("a100", "h100", "a40"):
        error = leave_one_model_out(MEASURED[name].gemms(data), M.peaks_of(data, MEASURED[name].gpu), rng)
        rows.append((name, "each model left out", error))
    source = fit_gemm(M.aiconfigurator_gemms(data, "h100_sxm"), M.peaks_of(data, "H100-SXM5"), rng=rng)
    for target, gpu in (("b200_sxm", "B200-SXM"), ("l40s", "L40S"), ("a100_sxm", "A100-80G-SXM4")):
        unseen = M.aiconfigurator_gemms(data, target)
        error = score(source.layer_s(unseen, M.peaks_of(data, gpu)), unseen.measured_s.sum(axis=1))
        rows.append((target, "H100's coefficients, this GPU's datasheet", error))
    return [(a, b, f"{e['rows']:.0f}", *(f"{100 * e[k]:.1f}" for k in ("mean", "median", "p90"))) for a, b, e in rows]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None, help="folder with the timing tables: adds the whole-unit checks")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    arguments = parser.parse_args(argv)
    if arguments.data is not None and not (arguments.data / "gpu_specs.csv").exists():
        print(f"no gpu_specs.csv in {arguments.data}; give --data the folder of the timing tables", file=sys.stderr)
        return 2
    profiles = load_profiles()
    print(as_table(error_rows(profiles), arguments.markdown))
    if arguments.data is not None:
        print("\n" + as_table(whole_unit_rows(arguments.data), arguments.markdown))
    print()
    for name, found in sorted(profiles.items()):
        for family, text in {**found.provenance, **{key: f"borrowed: {value}" for key, value in found.borrowed.items()}}.items():
            print(f"{name}.{family}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
