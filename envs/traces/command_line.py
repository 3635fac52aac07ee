"""Arguments of `python -m envs.traces`: one sub-command per verb, units in the names, defaults in the help."""

from __future__ import annotations

import argparse

from envs.traces.formats import READERS
from envs.traces.public_files import PUBLIC_FILES
from envs.traces.read_options import TIME_UNITS_S
from envs.traces.synthetic_twin import TWINS


class _OneLineParser(argparse.ArgumentParser):
    """Bad arguments give one line on stderr and exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message}\n")


def _add_reading(parser: argparse.ArgumentParser) -> None:
    reading = parser.add_argument_group("reading")
    reading.add_argument("--format", help=f"instead of recognising the content; one of {', '.join(READERS)}")
    reading.add_argument("--columns", help="generic format: arrival=ts,prompt=in,output=out[,session=...,service_class=...,...]")
    reading.add_argument(
        "--time-unit", default="s", help=f"of the generic format: {', '.join(TIME_UNITS_S)} or stamp (default %(default)s)"
    )
    reading.add_argument("--rate", type=float, help="made-up arrivals, requests (or sessions) per second (default: the file's own)")
    reading.add_argument("--burstiness", type=float, default=1.0, help="gamma shape of made-up gaps, 1 = Poisson (default %(default)s)")
    reading.add_argument(
        "--spread-ticks-s", type=float, help="spread requests of one stamp over so many seconds (Mooncake: 3; default off)"
    )
    reading.add_argument("--seed", type=int, default=0, help="of everything drawn (default %(default)s)")
    reading.add_argument("--class", dest="service_class", help="service class of all rows: chat, code or batch (default: the file's)")
    reading.add_argument("--keep-zero-output", action="store_true", help="keep rows without output as one token (default: left out)")
    reading.add_argument("--duration-s", type=float, help="seconds to draw from a file of parameters (ServeGen, BLIS)")
    reading.add_argument(
        "--window-start-s", type=float, default=0.0, help="where in ServeGen's days to begin, seconds (default %(default)s)"
    )
    reading.add_argument("--rate-scale", type=float, default=1.0, help="times the rate of a file of parameters (default %(default)s)")
    reading.add_argument("--characters-per-token", type=float, help="count tokens of texts so (default: texts are refused)")
    reading.add_argument("--default-output-tokens", type=int, help="where a row has no output length (default: refused)")
    reading.add_argument("--year", type=int, default=2000, help="of vLLM log stamps, which carry none (default %(default)s)")


def _add_window(parser: argparse.ArgumentParser) -> None:
    window = parser.add_argument_group("window")
    window.add_argument("--start-s", type=float, help="first second (default: the beginning)")
    window.add_argument("--end-s", type=float, help="end, excluded, seconds (default: the end)")
    window.add_argument("--limit", type=int, help="so many requests, no fewer (default: all)")
    window.add_argument("--repeat", action="store_true", help="lay copies end to end when --limit asks for more than there are")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", help="file to write, JSONL in the project's own format; .gz and .zst are compressed")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def build_parser() -> argparse.ArgumentParser:
    """The whole parser."""
    parser = _OneLineParser(prog="python -m envs.traces", description="Look at, convert and make request traces. Times are seconds.")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=_OneLineParser, metavar="VERB")

    inspect = verbs.add_parser("inspect", help="rows, span, rates, burstiness, lengths, prefix sharing, what was left out")
    inspect.add_argument("trace", help="trace file (or ServeGen, Weka folder)")
    inspect.add_argument("--json", action="store_true", help="statistics as one JSON object")
    inspect.add_argument("--capacity-tokens-per-s", type=float, help="warn when the mean load is under 5 %% of this")

    convert = verbs.add_parser("convert", help="write the project's own JSONL, row by row, nothing lost")
    slice_ = verbs.add_parser("slice", help="cut a window out, re-based to 0")
    scale = verbs.add_parser("scale", help="run the clock faster or slower")
    scale.add_argument("--factor", type=float, required=True, help="all times are divided by it: 2 = twice the rate")
    for verb in (convert, slice_, scale):
        verb.add_argument("trace", help="trace file (or ServeGen, Weka folder)")
        _add_output(verb)
    for verb in (inspect, convert, slice_, scale):
        _add_reading(verb)
    for verb in (inspect, slice_, scale):
        _add_window(verb)

    mix = verbs.add_parser("mix", help="lay traces over one another on one clock")
    mix.add_argument("traces", nargs="+", metavar="trace", help="trace files")
    _add_output(mix)
    _add_reading(mix)

    make = verbs.add_parser("synthesize", help="draw a synthetic twin of a public trace")
    make.add_argument("kind", help=f"one of {', '.join(TWINS)}")
    _add_output(make)
    make.add_argument("--duration-s", type=float, default=3600.0, help="seconds (default %(default)s)")
    make.add_argument("--rate-scale", type=float, default=1.0, help="times the mean rate (default %(default)s)")
    make.add_argument("--seed", type=int, default=0, help="default %(default)s")
    make.add_argument("--spread-ticks", action="store_true", help="mooncake: spread the 3 s ticks (default: reproduce them)")

    get = verbs.add_parser("fetch", help="download a public trace file")
    get.add_argument("name", help=f"one of {', '.join(PUBLIC_FILES)}")
    get.add_argument("--folder", help="where to (default: replay_logs/cache in the project)")
    get.add_argument("--deadline-s", type=float, default=60.0, help="seconds for the whole download (default %(default)s)")
    get.add_argument("--force", action="store_true", help="replace the file if it exists")
    return parser
