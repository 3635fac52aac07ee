"""Faults strike a real service under load: what is lost, how soon it goes on, and what the others feel of it.

`python -m benchmarks.drill` starts `python -m runtime serve` with groups of unlike ranks and asks it greedy questions over HTTP, streaming
and not, in turns: a slice of calm, a slice in which ranks are killed, frozen, cut off, slowed and fed wrong bytes, and whole groups killed.
Every answer is compared with the one that the same service gave before the first fault. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.conditions import MachineLoad
from benchmarks.drill_clients import CONTENT, Clients, Reference
from benchmarks.drill_faults import KINDS, FaultKind, strike
from benchmarks.drill_figures import Found, Strike, bars, table
from benchmarks.drill_service import DrilledService, drilled
from benchmarks.prompts import TextPieces
from benchmarks.reporting import print_bars
from benchmarks.router_processes import PROJECT
from runtime.torch_tp.config import CheckpointError, read_config
from runtime.torch_tp.model_folder import model_folder

SMALL = Path(os.environ.get("BALLAST_SHARED", PROJECT.parent / "shared")) / "models" / "aidreams260k"
GROUPS = {"small": {"pair": (8.0, 16.0), "trio": (6.0, 9.0, 18.0)}, "large": {"pair": (1.0, 2.0), "other": (1.0, 1.5)}}
"""By model, how many times slower each rank plays to be."""
SIXES = ("kill", "freeze", "cut", "slow", "garble", "group", "kill", "freeze", "cut", "slow", "garble_group", "group")
"""Each sort of fault as often as the others."""
COUNTS = {"small": (10_000, 200), "large": (300, 20)}
SLICE_FAULTS = 10
PAUSE_S, LOOK_S, TAIL_S = 1.0, 0.5, 0.005
UNSEEN_S, BACK_S = 15.0, 120.0
REFERENCES, PROMPT_TOKENS, ANSWER_TOKENS = 40, (4, 40), (12, 48)


class Drill:
    """Strikes a service while clients ask; `strikes` so far."""

    def __init__(self, service: DrilledService, clients: Clients, kinds: Sequence[FaultKind], rng: random.Random) -> None:
        self.strikes: list[Strike] = []
        self._service, self._clients, self._rng, self._kinds = service, clients, rng, list(kinds)
        self._whole = set(service.groups)

    async def run(self, requests: int, has_calm: bool) -> None:
        """Slices of faults and, where wanted, of calm by turns, so many requests in the former altogether."""
        watching = [asyncio.create_task(self._watch()), asyncio.create_task(self._listen())]
        faults, done, load = len(self._kinds), 0, MachineLoad()
        try:
            while self._kinds:
                mine, self._kinds = self._kinds[:SLICE_FAULTS], self._kinds[SLICE_FAULTS:]
                share = requests * len(mine) // faults
                with load.watched():
                    began_s, before = time.monotonic(), len(self._clients.answers)
                    await self._storm(mine, share)
                    done += len(self._clients.answers) - before
                    _progress(faults - len(self._kinds), faults, done, self._clients)
                    if has_calm:
                        await self._calm(time.monotonic() - began_s, len(mine))
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        for failed in (task.exception() for task in watching if not task.cancelled()):
            if failed is not None:
                raise failed
        print(f"requests during faults {done}; machine busy {load.median:.0%}", flush=True)

    async def _storm(self, kinds: Sequence[FaultKind], requests: int) -> None:
        wanted = len(self._clients.answers) + requests
        for kind in kinds:
            await asyncio.sleep(self._rng.uniform(0.0, PAUSE_S))
            await self._strike(kind)
        await self._until(lambda: len(self._whole) == len(self._service.groups), BACK_S)
        await self._until(lambda: len(self._clients.answers) >= wanted, float("inf"))

    async def _calm(self, for_s: float, moments: int) -> None:
        """As long, with as many moments in which a fault could have struck."""
        waits = sorted(self._rng.uniform(0.0, for_s) for _ in range(moments))
        began_s = time.monotonic()
        for wait_s in waits:
            await asyncio.sleep(max(0.0, began_s + wait_s - time.monotonic()))
            self.strikes.append(Strike(None, self._rng.choice(list(self._service.groups)), time.monotonic()))
        await asyncio.sleep(max(0.0, began_s + for_s - time.monotonic()))

    async def _strike(self, kind: FaultKind) -> None:
        """A random group that is whole; where the fault takes all of it, another one must be."""
        await self._until(lambda: len(self._whole) > kind.takes_group, BACK_S)
        group = self._rng.choice(sorted(self._whole))
        found = Strike(kind, group, time.monotonic())
        if not await strike(self._service, kind, group, self._rng):
            print(f"{kind.name} found nobody in {group}", flush=True)
            return
        self.strikes.append(found)
        if kind.rule is None:
            found.whole_s = time.monotonic()
            return
        self._whole.discard(group)
        await self._until(lambda: found.noticed_s is not None, UNSEEN_S)

    async def _until(self, condition: Callable[[], bool], deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while not condition() and time.monotonic() < end_s:
            if self._service.process.poll() is not None:
                raise RuntimeError(f"the service ended with {self._service.process.returncode}; see {self._service.log_file}")
            await asyncio.sleep(TAIL_S)

    async def _listen(self) -> None:
        """Note when the service says that it lost somebody."""
        while True:
            for news in self._service.news():
                for found in self.strikes:
                    is_such = found.kind is not None and found.kind.rule is not None and found.kind.takes_group is news.is_whole_group
                    if is_such and found.group == news.group and found.noticed_s is None:
                        found.noticed_s = news.at_s
            await asyncio.sleep(TAIL_S)

    async def _watch(self) -> None:
        """Note which groups are whole again."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                state = await asyncio.to_thread(self._service.state)
            except OSError as error:  # it is late; what its callers get is judged by themselves
                print(f"no state: {error}", flush=True)
                continue
            now_s = time.monotonic()
            for found in self.strikes:
                if found.kind is None or found.whole_s is not None or found.noticed_s is None or found.noticed_s > now_s - LOOK_S:
                    continue
                if self._service.is_whole(found.group, state):
                    found.whole_s = now_s
                    self._whole.add(found.group)


def _progress(done: int, of: int, requests: int, clients: Clients) -> None:
    wide = 30 * done // of
    wrong = sum(answer.verdict not in CONTENT for answer in clients.answers)
    print(f"[{'#' * wide}{'.' * (30 - wide)}] faults {done}/{of}, requests {requests}, wrong {wrong}", file=sys.stderr, flush=True)


async def references(clients: Clients, folder: Path, rng: random.Random) -> list[Reference]:
    pieces = TextPieces(folder)
    prompts = [pieces.take(1, rng.randint(*PROMPT_TOKENS))[0] for _ in range(REFERENCES)]
    return await asyncio.gather(*(clients.refer(prompt, rng.randint(*ANSWER_TOKENS)) for prompt in prompts))


async def run(service: DrilledService, folder: Path, options: argparse.Namespace) -> Found:
    rng = random.Random(options.seed)
    asking, striking, chance = (random.Random(rng.random()) for _ in range(3))
    clients = Clients(service.url, "drilled", asking)
    asked = await references(clients, folder, asking)
    print(f"references: {len(asked)} answers, {sum(reference.tokens for reference in asked)} tokens", flush=True)
    kinds = [KINDS[SIXES[number % len(SIXES)]] for number in range(options.faults)]
    chance.shuffle(kinds)
    drill = Drill(service, clients, kinds, striking)
    clients.start(asked, options.clients)
    try:
        await drill.run(options.requests, not options.no_calm)
    finally:
        await clients.stop()
    return Found(clients.answers, drill.strikes, {})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drill", description=__doc__)
    parser.add_argument("--model", default="small", help="small (the shared checkpoint), smollm2, or a path (default %(default)s)")
    parser.add_argument("--requests", type=int, help="answers during faults; calm lasts as long again (default 10000, or 300)")
    parser.add_argument("--faults", type=int, help="how many strike (default 200; with another model than small 20)")
    parser.add_argument("--clients", type=int, default=8, help="requests in flight (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of requests, faults and moments (default %(default)s)")
    parser.add_argument("--no-calm", action="store_true", help="faults alone, without slices of calm to compare with")
    parser.add_argument("--keep", type=Path, help="folder for the service's files and log (default: a temporary one)")
    options = parser.parse_args(arguments)
    options.size = "small" if options.model == "small" else "large"
    requests, faults = COUNTS[options.size]
    options.requests, options.faults = options.requests or requests, options.faults or faults
    for name in ("requests", "faults", "clients"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.size == "small" and not SMALL.is_dir():
        print(f"skipped: no checkpoint at {SMALL}; set BALLAST_SHARED to the folder that holds it", flush=True)
        return 0
    try:
        folder = model_folder(SMALL if options.size == "small" else options.model)
        config = read_config(folder)
    except CheckpointError as error:
        print(f"python -m benchmarks.drill: --model: {error}", file=sys.stderr)
        return 2
    groups = GROUPS[options.size]
    print(f"seed {options.seed}, model {config.name}, EMULATED ranks {groups}", flush=True)
    with tempfile.TemporaryDirectory(prefix="drill-") as scratch:
        place = options.keep or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        with drilled(place, folder, config, groups) as service:
            found = asyncio.run(run(service, folder, options))
        left = service.left()
        found.served_by = service.served_by()
    print(*left, *([] if left else ["nothing left"]), sep="\n")
    print(f"answers {len(found.answers)}, {dict(found.verdicts())}")
    print(table(found))
    made = bars(found, left)
    for bar in made:
        print(f"{'ok  ' if bar.ok else 'MISS'} {bar.name}: {bar.value:g} (wanted {bar.wanted:g}, n {bar.n})")
    print_bars(made, seed=options.seed, model=config.name, requests=len(found.answers), faults=options.faults, ties=found.verdicts()["tie"])
    return 0 if all(bar.ok for bar in made) else 1


if __name__ == "__main__":
    sys.exit(main())
