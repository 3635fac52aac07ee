"""`python -m agents.inspect_bundle DIR`: what is in a policy bundle, as plain text. Reads it as the service would; needs no torch."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agents.policy_bundle import BundleContents, BundleError, load_bundle
from envs.decision import observation


def describe(contents: BundleContents) -> str:
    """Readable description of a bundle; every line at most about 100 characters."""
    schema, network, scaling = contents.schema, contents.network, contents.scaling
    parameters = sum(int(array.size) for array in contents.weights.values())
    lines = _section(
        "schema",
        {
            "decides": schema.decision_kind,
            "observation version": f"{schema.observation_version} ({_fit(contents)})",
            "candidates at most": schema.candidates_max,
            "features": f"{len(schema.feature_names)} per candidate, {len(schema.context_names)} of the context",
            "schema SHA-256": schema.digest(),
        },
    )
    lines += _section("network", {"hidden": network.hidden, "activation": network.activation, "parameters": f"{parameters:,}"})
    lines += ["training ranges (raw input, before scaling)"]
    lines += _ranges(schema.feature_names, scaling.candidate_low, scaling.candidate_high)
    lines += _ranges(schema.context_names, scaling.context_low, scaling.context_high)
    lines += ["", *_section("provenance", contents.provenance), *_section("evaluation", contents.evaluation)]
    return "\n".join(lines).rstrip()


def _fit(contents: BundleContents) -> str:
    """Whether this program's encoder speaks the bundle's schema."""
    schema = contents.schema
    ours = (observation.OBSERVATION_VERSION, observation.FEATURES, observation.CONTEXT)
    if (schema.observation_version, schema.feature_names, schema.context_names) == ours:
        return "as this program's"
    return f"NOT this program's, which is {ours[0]}: the service would refuse it"


def _section(title: str, values: Mapping[str, Any]) -> list[str]:
    rows = list(_flat(values)) or [("(empty)", "")]
    width = max(len(name) for name, _ in rows)
    return [title, *(f"  {name:<{width}}  {value}".rstrip() for name, value in rows), ""]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as dotted names; numbers with at most six digits, lists as they are."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", f"{value:.6g}" if isinstance(value, float) else str(value)


def _ranges(names: Sequence[str], low: np.ndarray, high: np.ndarray) -> list[str]:
    """One line per input that varied; those that never did are folded into one line per value."""
    varied = [(name, a, b) for name, a, b in zip(names, low, high, strict=True) if a != b]
    width = max((len(name) for name in names), default=0)
    lines = [f"  {name:<{width}}  {a:>10.4g} to {b:>10.4g}" for name, a, b in varied]
    constant: dict[float, list[str]] = {}
    for name, a, b in zip(names, low, high, strict=True):
        if a == b:
            constant.setdefault(float(a), []).append(name)
    for value, group in sorted(constant.items()):
        lines += textwrap.wrap(", ".join(group), 96, initial_indent=f"  always {value:g}: ", subsequent_indent="    ")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 shown, 2 not a usable bundle."""
    parser = argparse.ArgumentParser(prog="python -m agents.inspect_bundle", description="Show what is in a policy bundle.")
    parser.add_argument("directory", help="bundle directory, e.g. runs/NAME/bundle/route")
    options = parser.parse_args(arguments)
    try:
        policy = load_bundle(options.directory)
    except BundleError as error:
        print(f"inspect_bundle: {error}", file=sys.stderr)
        return 2
    try:
        print(describe(policy.contents))
    except BrokenPipeError:  # the reader (head, less) has seen enough
        sys.stderr.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
