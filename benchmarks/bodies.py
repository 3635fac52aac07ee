"""Generated request bodies, whatever comes in: no server error, no hang. `python -m benchmarks.bodies`.

Most are given to the gateway within this process, over a fleet that answers at once; a share goes over a connection to a real service with
real ranks of the small shared checkpoint. By turns: requests that are nearly right, any JSON, right ones with bytes changed, and
what schemathesis, where it is installed, makes of the published OpenAPI document. Ends with one line of JSON with its bars.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.body_answers import Echo, InProcess, OverHttp, Told, fault_of
from benchmarks.body_shapes import Asked, BodyShapes, described
from benchmarks.drill_service import DrilledService, write_files
from benchmarks.reporting import Bar, at_least, at_most, print_bars
from benchmarks.router_processes import PROJECT
from runtime.gateway.app import make_app
from runtime.gateway.interface import ServedModel
from runtime.gateway.openapi import description
from runtime.torch_tp.config import read_config
from runtime.torch_tp.model_folder import model_folder

SMALL = Path(os.environ.get("BALLAST_SHARED", PROJECT.parent / "shared")) / "models" / "aidreams260k"
CONTEXT_TOKENS = 96
"""Of both services: no answer is long enough to be taken for a hang."""
ROUND = 500
"""Bodies from one seed: hypothesis keeps what it has drawn, and slows down with it."""
HANG_S = 1.0
ASKED_AGAIN = 2
"""Times. What takes over HANG_S each time hangs by itself; once, the machine had other work (`slow_once`)."""
SHOWN_MAX = 20
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

Ask = Callable[[Asked], Told]


@dataclass(slots=True)
class Found:
    """What became of the bodies. statuses: by place, kind and status."""

    statuses: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    hangs: int = 0
    slow_once: int = 0
    server_errors: int = 0
    slowest_s: float = 0.0

    @property
    def bodies(self) -> int:
        return self.statuses.total()

    def take(self, place: str, kind: str, asked: Asked, told: Told) -> None:
        self.statuses[place, kind, told.status] += 1
        self.slowest_s = max(self.slowest_s, told.took_s)
        fault = fault_of(told)
        if told.took_s > HANG_S:
            self.hangs += 1
            fault = fault or f"took {told.took_s:.2f} s"
        if fault is not None:
            self.server_errors += told.status >= 500 or "server error" in fault
            self._note(place, kind, asked, f"{fault}: {told.data[-300:]!r}")

    def lost(self, place: str, kind: str, asked: Asked, error: Exception) -> None:
        """There was no answer."""
        self.statuses[place, kind, 0] += 1
        self.hangs += 1
        self._note(place, kind, asked, f"no answer ({type(error).__name__}: {error})")

    def _note(self, place: str, kind: str, asked: Asked, fault: str) -> None:
        self.faults.append(fault)
        if len(self.faults) <= SHOWN_MAX:
            print(f"{place}, {kind}: {fault}\n    {asked[0]} {asked[1][:2000]!r}", flush=True)


def drawn(strategy: st.SearchStrategy[Asked], count: int, number: int, take: Callable[[Asked], None]) -> None:
    """Give `count` bodies to `take`, the same for the same number."""

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def each(asked: Asked) -> None:
        take(asked)

    each()


def run(place: str, ask: Ask, kinds: Mapping[str, st.SearchStrategy[Asked]], bodies: int, first_seed: int, found: Found) -> None:
    """So many bodies, a round of each kind in turn."""
    began_s, left = time.monotonic(), bodies
    for number, (kind, strategy) in zip(itertools.count(first_seed), itertools.cycle(kinds.items())):
        before = found.bodies

        def take(asked: Asked, kind: str = kind) -> None:
            try:
                told = ask(asked)
                if told.took_s > HANG_S:
                    again = [ask(asked) for _ in range(ASKED_AGAIN)]
                    found.slow_once += any(other.took_s <= HANG_S for other in again)
                    told = min([told, *again], key=lambda each: each.took_s)
            except Exception as error:  # whatever it is, the body is the finding
                found.lost(place, kind, asked, error)
            else:
                found.take(place, kind, asked, told)

        drawn(strategy, min(ROUND, left), number, take)
        left -= found.bodies - before
        if number % 20 == 0 or left <= 0:
            print(f"{place}: {bodies - left:,} bodies in {time.monotonic() - began_s:.0f} s, {len(found.faults)} faults", flush=True)
        if left <= 0:
            return


def kinds_for(model: str) -> Mapping[str, st.SearchStrategy[Asked]]:
    published = {f"described {path}": strategy for path, strategy in described(description("0", [model])).items()}
    return {**BodyShapes([model]).all(), **published}


@contextmanager
def gateway(model: Path) -> Iterator[InProcess]:
    """The gateway's application over a fleet that answers at once, its text made by the model's tokenizer."""
    app = make_app(Echo(ServedModel("drilled", CONTEXT_TOKENS, str(model))))
    asking = InProcess(app)
    try:
        yield asking
    finally:
        asking.close()


@contextmanager
def service(folder: Path, checkpoint: Path) -> Iterator[DrilledService]:
    """Real ranks of the checkpoint, which has no chat template and here is given one."""
    model = folder / "model"
    shutil.copytree(checkpoint, model)
    model.chmod(0o755)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = replace(read_config(model), context_tokens=CONTEXT_TOKENS)
    file = write_files(folder, model, config, {"one": (1.0,), "two": (1.0,)})
    with DrilledService(file, {"one": 1, "two": 1}) as running:
        running.wait()
        yield running


def bars(found: Found, wanted: int) -> list[Bar]:
    return [
        at_least("bodies", found.bodies, wanted, 1),
        at_most("server errors", found.server_errors, 0, found.bodies),
        at_most(f"hangs over {HANG_S:g} s", found.hangs, 0, found.bodies),
        at_most("answers in another shape than the API's, those included", len(found.faults), 0, found.bodies),
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--bodies", type=int, default=200_000)
    parser.add_argument("--served-share", type=float, default=0.05, help="of them over a connection, to real ranks of --checkpoint")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and chat template the gateway within this process uses")
    parser.add_argument("--checkpoint", type=Path, default=SMALL, help="of the real ranks")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    found = Found()
    served = round(options.served_share * options.bodies) if options.checkpoint.is_dir() else 0
    kinds = kinds_for("drilled")
    if not any(kind.startswith("described") for kind in kinds):
        print("schemathesis is not installed: no bodies from the published document (pip install 'ballast[clients]')", flush=True)
    if served:
        with tempfile.TemporaryDirectory() as name, service(Path(name), options.checkpoint) as running:
            http = OverHttp(int(running.url.rpartition(":")[2]))
            run("served", http.ask, kinds, served, options.seed + 1_000_000, found)
            http.close()
    else:
        print(f"no checkpoint at {options.checkpoint}: nothing goes to real ranks", flush=True)
    with gateway(model_folder(options.model)) as asking:
        run("in process", asking.ask, kinds, options.bodies - served, options.seed, found)
    for (place, kind, status), count in sorted(found.statuses.items()):
        print(f"{place:10s} {kind:32s} {status} {count:8,d}", flush=True)
    result = bars(found, options.bodies)
    print_bars(result, served=served, slowest_s=round(found.slowest_s, 3), slow_once=found.slow_once, is_emulation=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
