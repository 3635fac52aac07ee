"""`python -m envs.traces`: what each verb does. Bad input: one line on stderr, exit code 2, nothing written."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from envs.domain.requests import CLASS_INDEX, SERVICE_CLASSES
from envs.domain.suggestions import unknown_name
from envs.traces import load_trace, mix, open_trace
from envs.traces.arrivals import ArrivalProcess
from envs.traces.atomic_write import whole_text_file
from envs.traces.command_line import build_parser
from envs.traces.default_traces import PROJECT_ROOT
from envs.traces.formats.ballast import head_line, row_line
from envs.traces.public_files import fetch, public_file
from envs.traces.read_options import ReadOptions
from envs.traces.synthetic_twin import synthesize
from envs.traces.trace_row import TraceError, TraceRow
from envs.traces.trace_statistics import arrivals_of, describe, lengths_of, sharing_of
from envs.traces.trace_table import TraceTable
from envs.traces.windows import quiet_warning


def _reading(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of the reading group, as `format` and `options`."""
    columns: dict[str, str] = {}
    for pair in (arguments.columns or "").split(",") if arguments.columns else ():
        role, equals, name = pair.partition("=")
        if not (role and equals and name):
            raise TraceError(f"--columns: {pair!r} is not role=name; e.g. --columns arrival=ts,prompt=in,output=out")
        columns[role.strip()] = name.strip()
    if arguments.service_class is not None and arguments.service_class not in CLASS_INDEX:
        raise TraceError(unknown_name("service class", arguments.service_class, CLASS_INDEX))
    per_token = arguments.characters_per_token
    if per_token is not None and not per_token > 0:
        raise TraceError(f"--characters-per-token {per_token} must be positive")
    options = ReadOptions(
        arrival=None if arguments.rate is None else ArrivalProcess(arguments.rate, arguments.burstiness),
        spread_ticks_s=arguments.spread_ticks_s,
        seed=_seed(arguments),
        service_class=arguments.service_class,
        keep_zero_output=arguments.keep_zero_output,
        duration_s=arguments.duration_s,
        window_start_s=arguments.window_start_s,
        rate_scale=arguments.rate_scale,
        count_tokens=None if per_token is None else lambda text: math.ceil(len(text) / per_token),
        default_output_tokens=arguments.default_output_tokens,
        columns=columns,
        time_unit=arguments.time_unit,
        year=arguments.year,
    )
    return {"format": arguments.format, "options": options}


def _seed(arguments: argparse.Namespace) -> int:
    if arguments.seed < 0:
        raise TraceError(f"--seed {arguments.seed} must be 0 or more")
    return int(arguments.seed)


def _load(arguments: argparse.Namespace) -> TraceTable:
    window = {name: getattr(arguments, name) for name in ("limit", "start_s", "end_s", "repeat")}
    return load_trace(arguments.trace, **window, **_reading(arguments))


def _write(rows: Iterable[TraceRow], head: Callable[[], str], arguments: argparse.Namespace) -> int:
    """Write rows in the project's format. The head is asked for after the first row, when the reader knows its class."""
    count = 0
    with whole_text_file(Path(arguments.output), arguments.force) as out:
        for row in rows:
            if not count:
                out.write(head() + "\n")
            out.write(row_line(row) + "\n")
            count += 1
        if not count:
            raise TraceError(f"{arguments.output}: no rows to write; choose another window")
    return count


def _write_table(table: TraceTable, arguments: argparse.Namespace) -> None:
    count = _write(table.rows(), lambda: head_line(table.source, SERVICE_CLASSES[0].name, table.synthetic), arguments)
    print(f"{arguments.output}: {count} requests, {table.span_s:.3f} s, from {table.source}")


def _inspect(arguments: argparse.Namespace) -> None:
    table = _load(arguments)
    report = table.report
    warning = None
    if arguments.capacity_tokens_per_s is not None:
        warning = quiet_warning(table, arguments.capacity_tokens_per_s)
    if arguments.json:
        sharing, prompt, output = sharing_of(table), lengths_of(table.prompt_tokens), lengths_of(table.output_tokens)
        parts = {"prompt_tokens": prompt, "output_tokens": output, "sharing": sharing}
        document = {
            "source": table.source,
            "synthetic": table.synthetic,
            "arrivals": asdict(arrivals_of(table)),
            **{name: None if part is None else asdict(part) for name, part in parts.items()},
            "left_out": dict(report.left_out) if report else {},
            "notes": report.notes if report else [],
            "warning": warning,
        }
        print(json.dumps(document, allow_nan=False))
        return
    lines = [*describe(table), *(report.lines() if report else []), *([f"warning: {warning}"] if warning else [])]
    print("\n".join(lines))


def _convert(arguments: argparse.Namespace) -> None:
    stream = open_trace(arguments.trace, **_reading(arguments))
    report = stream.report
    _write(stream, lambda: head_line(arguments.trace, report.default_class, report.synthetic), arguments)
    print("\n".join([f"{arguments.output}: {report.rows} requests", *report.lines()]))


def _slice(arguments: argparse.Namespace) -> None:
    _write_table(_load(arguments), arguments)


def _scale(arguments: argparse.Namespace) -> None:
    _write_table(_load(arguments).compress(arguments.factor), arguments)


def _mix(arguments: argparse.Namespace) -> None:
    _write_table(mix([load_trace(path, **_reading(arguments)) for path in arguments.traces]), arguments)


def _synthesize(arguments: argparse.Namespace) -> None:
    rng = np.random.default_rng(_seed(arguments))
    _write_table(synthesize(arguments.kind, arguments.duration_s, arguments.rate_scale, rng, arguments.spread_ticks), arguments)


def _fetch(arguments: argparse.Namespace) -> None:
    file = public_file(arguments.name)
    if not arguments.deadline_s > 0:
        raise TraceError(f"--deadline-s {arguments.deadline_s} must be positive")
    folder = Path(arguments.folder) if arguments.folder else PROJECT_ROOT / "replay_logs" / "cache"
    made = not folder.exists() and not arguments.folder
    if made:
        folder.mkdir(parents=True)
    try:
        path, proof = fetch(file, folder, arguments.deadline_s, arguments.force)
    except TraceError:
        if made:
            folder.rmdir()
        raise
    print(f"{path}: {proof}; licence {file.licence}")


VERBS: dict[str, Callable[[argparse.Namespace], None]] = {
    "inspect": _inspect,
    "convert": _convert,
    "slice": _slice,
    "scale": _scale,
    "mix": _mix,
    "synthesize": _synthesize,
    "fetch": _fetch,
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns 0, or 2 after one line on stderr."""
    arguments = build_parser().parse_args(argv)
    try:
        VERBS[arguments.verb](arguments)
    except TraceError as fault:
        print(f"envs.traces {arguments.verb}: {' '.join(str(fault).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, e.g. head, has gone
        sys.stderr.close()
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
