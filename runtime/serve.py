"""`python -m runtime serve`: reads the configuration, starts the groups, serves until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
import uvloop

from agents.policy_bundle import BundleError, load_bundle
from envs.decision.actions import Decision
from envs.scenario.scenario_error import ScenarioError
from runtime import process_memory
from runtime.backends.emulated_kernel import KernelSettings, kernel_of, kv_tokens, plan_of
from runtime.gateway.app import make_app, version
from runtime.gateway.server import listen, make_server
from runtime.gateway.smaller_model import why_unreachable
from runtime.reload import Reloader, ReloadRefused
from runtime.rollout.metrics import RolloutMetrics
from runtime.rollout.state import RolloutError
from runtime.scheduling.metrics import SchedulingMetrics
from runtime.scheduling.policy_process import check_fits, wanted_of
from runtime.service import Service, candidates_of
from runtime.service_admin import ServiceAdmin
from runtime.service_config import ServiceConfig, load_service
from runtime.tracing.tracer import Tracer

DEMONSTRATION = Path(__file__).with_name("demonstration") / "service.yaml"
KERNELS_QUIET_S = 2.0
LAST_WORDS_S = 2.0
"""What the requests that are cut off at the end get to tell their callers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", help="cluster file, or a ready cluster's name (default: the service file's)")
    parser.add_argument("--bundle", help="directory of an exported route policy; without one the heuristic decides")
    parser.add_argument("--split-bundle", help="directory of an exported split policy")
    parser.add_argument("--rebalance-bundle", help="directory of an exported rebalance policy")
    parser.add_argument("--config", type=Path, help="service file (default: all groups emulated)")
    parser.add_argument("--demonstration", action="store_true", help="SmolLM2 on three emulated unlike ranks in two groups")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for any free one (default 8000)")
    parser.add_argument("--record-dir", help="folder for records of requests and decisions (default: the service file's, or none)")
    parser.add_argument("--check", action="store_true", help="say what would start and whether it fits, and start nothing")


def read(options: argparse.Namespace) -> ServiceConfig:
    """Raises: ScenarioError in one line."""
    for name in ("cluster", "bundle", "split_bundle", "rebalance_bundle", "host", "record_dir"):
        if getattr(options, name) == "":
            raise ScenarioError(f"--{name.replace('_', '-')}: empty; leave it out for what the service file says")
    if options.demonstration and options.config is not None:
        raise ScenarioError("give --demonstration or --config, not both")
    config = DEMONSTRATION if options.demonstration else options.config
    if config is None and options.cluster is None:
        raise ScenarioError("give --cluster FILE, --config FILE or --demonstration")
    return load_service(
        config, options.cluster, options.bundle, host=options.host, port=options.port, record_dir=options.record_dir,
        split_bundle=options.split_bundle, rebalance_bundle=options.rebalance_bundle,
    )  # fmt: skip


def explain(config: ServiceConfig) -> tuple[str, bool]:
    """What would start, line by line, and whether all of it can."""
    settings, cluster = KernelSettings(), config.cluster
    lines = [f"cluster {cluster.name}: model {cluster.model.name}, served as {config.model_name!r}"]
    for group, entry, is_parked in zip(cluster.groups, config.groups, cluster.parked, strict=True):
        plan = plan_of(group, settings.corner)
        tokens = kv_tokens(kernel_of(group, cluster.limits, settings, 0.0))
        what = {"emulated": "EMULATED, no devices", "torch_tp": f"{len(group.ranks)} rank(s) here", "openai_http": str(entry.url)}[
            entry.kind
        ]
        if entry.ranks and any(rank.slow_factor > 1 for rank in entry.ranks):
            what += f", EMULATED slower x{', '.join(f'{rank.slow_factor:g}' for rank in entry.ranks)}"
        parked = ", parked" if is_parked else ""
        lines.append(f"  {group.name}: {entry.kind} ({what}){parked}; query heads {plan.query_heads}; KV for {tokens} tokens")
    fits = True
    control = config.control
    heuristics: dict[Decision, str] = {"route": config.dispatch.heuristic, "split": control.split, "rebalance": control.rebalance}
    for decision, heuristic in heuristics.items():
        text, is_good = _explain_policy(config, decision, heuristic)
        fits &= is_good
        lines.append(f"{decision}: {text}")
    if not control.is_on:
        lines.append("split and rebalance decisions are off")
    if (smaller := config.smaller_model) is not None:
        where = f"{smaller.model} at {smaller.url}, at most {smaller.max_in_flight} calls at once"
        lines.append(f"smaller model: {where}; takes what would be refused under pressure of the classes {', '.join(smaller.classes)}")
    if config.tracing is not None:
        lines.append(f"traces: to {config.tracing.url}, share {config.tracing.share:g} of requests that bring no trace of their own")
    for name, folder in (("records", config.records.dir), ("rollouts", config.rollout.dir)):
        if folder is not None:
            problem = _folder_problem(Path(folder))
            fits &= not problem
            with_prompts = ", with prompts" if name == "records" and config.records.prompt_ids else ""
            lines.append(f"{name}: {folder}{with_prompts}{problem}")
    lines.append(f"listens on {config.host}:{config.port}; {'API keys' if config.gateway.api_keys else 'no API keys'}")
    return "\n".join(lines), fits


def _folder_problem(folder: Path) -> str:
    """Why nothing could be written there; "" where it could, or the folder could be made."""
    nearest = next((place for place in (folder, *folder.absolute().parents) if os.path.lexists(place)), Path("/"))
    is_good = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return "" if is_good else f" refused: {nearest} is no folder that can be written to"


def _explain_policy(config: ServiceConfig, decision: Decision, heuristic: str) -> tuple[str, bool]:
    """Who would decide, and whether the bundle that shall, if any, can."""
    bundle = config.bundle_of(decision)
    if bundle is None:
        return f"no policy; {heuristic} decides", True
    try:
        policy = load_bundle(bundle)
        check_fits(policy, wanted_of(candidates_of(config.cluster, decision), decision))
    except BundleError as error:
        return f"{bundle} refused: {error}; {heuristic} would decide", False
    return f"{bundle}, at most {policy.schema.candidates_max} candidates; falls back to {heuristic}", True


async def serve(config: ServiceConfig, read_again: Callable[[], ServiceConfig]) -> int:
    """read_again: the configuration as its file says now, for reloading."""
    listening = listen(config.host, config.port)
    port = listening.getsockname()[1]
    service = Service(config)
    tracer = Tracer(config.tracing, version()) if config.tracing is not None else None
    app = make_app(
        service, config.gateway, administered=ServiceAdmin(service, version()), tracer=tracer, smaller_model=config.smaller_model
    )
    registry = app.state.metrics.registry
    registry.register(SchedulingMetrics(service.dispatcher))
    if service.recorder is not None:
        registry.register(service.recorder)
    if service.rollout is not None:
        registry.register(RolloutMetrics(service.rollout))
        service.rollout.say_url(f"http://{reachable(config.host)}:{port}")
    server = make_server(app, config.host, port, drain_s=config.drain_s)
    reloader = Reloader(service, app.state.generation, read_again)
    app.state.reloader, app.state.rollout = reloader, service.rollout

    def take_drain(new: ServiceConfig) -> None:
        server.config.timeout_graceful_shutdown = new.drain_s

    reloader.on_change = take_drain
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        if len(reloads) > 1:
            return  # one waits already, and will read what is there then
        task = asyncio.create_task(_reload_quietly(reloader))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    # uvicorn would raise the signal again at its end, before the groups are closed
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]

    def stop() -> None:
        server.force_exit = server.should_exit  # asked twice: at once
        server.should_exit = True
        app.state.generation.is_draining = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    starting = asyncio.create_task(_announce(service, config, port))

    def look_at(started: asyncio.Task[None]) -> None:
        """What cannot start at all must not listen on for ever."""
        if not server.should_exit and not started.cancelled() and started.exception() is not None:
            stop()

    starting.add_done_callback(look_at)
    try:
        await server.serve(sockets=[listening])
        if server.force_exit:  # uvicorn then leaves this out, and the loop's end would cancel it with a traceback
            await server.lifespan.shutdown()
        await _end_requests(server)
    finally:
        starting.cancel()
        await asyncio.wait([starting])
        await service.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    if not starting.cancelled():
        starting.result()
    return 0


async def _end_requests(server: uvicorn.Server) -> None:
    """Requests that outlasted the server's patience, which has cancelled them, or that an impatient operator cuts off: each tells its
    caller, as an error or as a stream's last event."""
    tasks = set(server.server_state.tasks)
    if server.force_exit:
        for task in tasks:
            task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=LAST_WORDS_S)


async def _reload_quietly(reloader: Reloader) -> None:
    """By signal there is nobody to be told but the log, which the reloader tells."""
    with contextlib.suppress(ReloadRefused):
        await reloader.reload()


def reachable(host: str) -> str:
    """An address at which a server that listens on `host` is found from this machine, as a URL has it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


async def _announce(service: Service, config: ServiceConfig, port: int) -> None:
    await service.start()
    process_memory.give_back()
    host = reachable(config.host)
    if any(backend.is_emulation for backend in service.dispatcher.backends):
        _say("EMULATION: some groups play slower devices, or none at all; their times and texts are not those of real ones.")
    body = f'{{"model": "{config.model_name}", "messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "stream": true}}'
    _say(f"ready on http://{host}:{port}; try:")
    _say(f"  curl -N http://{host}:{port}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")


def _say(text: str) -> None:
    """On stdout, while anybody reads it: a service must not end with the pager, or with the disk, that its words went to."""
    try:
        print(text, flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def _kernels_explained() -> Iterator[None]:
    """Says what is waited for where the kernels are not on disk yet: a silent minute looks like a hang."""
    said = "loading the kernels; the first run after an installation compiles them, which takes a minute or two"
    timer = threading.Timer(KERNELS_QUIET_S, print, (said,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGHUP, lambda *_: None)  # until there is something to reload; by default it would end us
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    process_memory.do_without_scipy()
    try:
        config = read(options)
        with _kernels_explained():
            text, fits = explain(config)
    except ValueError as error:
        print(f"python -m runtime serve: {error}", file=sys.stderr)
        return 2
    _say(text)
    if options.check:
        if config.smaller_model is not None and (why := asyncio.run(why_unreachable(config.smaller_model))):
            print(f"smaller model: {why}; until it can, those calls are refused", flush=True)
        return 0 if fits else 2
    try:
        return uvloop.run(serve(config, lambda: read(options)))
    except (ScenarioError, RolloutError) as error:
        print(f"python -m runtime serve: {error}", file=sys.stderr)
        return 2
    except (OSError, UnicodeError) as error:  # the latter of a host that no name server could be asked for
        print(f"python -m runtime serve: {config.host}:{config.port}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # told again while the interpreter ends, it would seem killed
