"""`python -m runtime rollout …`: asks the service that holds the rollout's folder, or works on the folder itself where none does."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from envs.scenario.scenario_error import ScenarioError
from runtime.records.decision_records import RecordError
from runtime.rollout.description import audit_shown, describe
from runtime.rollout.evidence import BadEvaluation, check_readable, read_key, replay_verdict
from runtime.rollout.recorded import compare_with_records
from runtime.rollout.state import RolloutError, begun, promoted, rolled_back
from runtime.rollout.store import RolloutBusy, RolloutStore, audit_faults, configured_digest
from runtime.service_config import ServiceConfig, load_service

TIMEOUT_S = 60.0
OPERATOR = "operator"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=type(parser))
    start = verbs.add_parser("start", help="check a bundle's evaluation against the incumbent; then it decides in shadow")
    start.add_argument("--bundle", type=Path, required=True, help="directory of the exported policy")
    start.add_argument("--evaluation", type=Path, required=True, help="its file of `python -m agents.evaluate`")
    start.add_argument("--incumbent-evaluation", type=Path, help="the incumbent bundle's, on the same worlds")
    status = verbs.add_parser("status", help="stage, gates, what is missing")
    status.add_argument("--json", action="store_true", help="everything, for machines")
    promote = verbs.add_parser("promote", help="one stage on, if its gates are passed")
    promote.add_argument("--force", action="store_true", help="even if they are not; the audit log says so")
    promote.add_argument("--reason", default="", help="for the audit log")
    rollback = verbs.add_parser("rollback", help="the incumbent decides alone, at once")
    rollback.add_argument("--reason", default="", help="for the audit log")
    audit = verbs.add_parser("audit", help="the last moves, and whether the log is whole")
    replay = verbs.add_parser("replay", help="what a bundle would have decided on recorded decisions")
    replay.add_argument("--bundle", type=Path, required=True, help="directory of the exported policy")
    replay.add_argument("--records", type=Path, required=True, help="folder of --record-dir, or one decisions file")
    for verb in (start, status, promote, rollback, audit):
        verb.add_argument("--config", type=Path, required=True, help="service file, with rollout.dir")
        verb.add_argument("--cluster", help="as given to serve")
        verb.add_argument("--serve-bundle", help="as given to serve with --bundle")


def main(options: argparse.Namespace) -> int:
    """Exit code: 0 done, 1 refused by the gates or the service, 2 bad input."""
    try:
        if options.verb == "replay":
            print("\n".join(compare_with_records(options.bundle, options.records)))
            return 0
        config = load_service(options.config, options.cluster, options.serve_bundle)
        if config.rollout.dir is None:
            raise ScenarioError(f"{options.config}: rollout.dir: missing; give a folder for the rollout's state")
        if options.verb == "start":
            for evaluation in filter(None, (options.evaluation, options.incumbent_evaluation)):
                check_readable(evaluation)
    except (ScenarioError, RecordError, BadEvaluation) as error:
        print(f"python -m runtime rollout: {error}", file=sys.stderr)
        return 2
    try:
        said = _carried_out(options, config)
    except RolloutError as error:
        print(f"python -m runtime rollout {options.verb}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(said, indent=1) if getattr(options, "json", False) else "\n".join(_lines(said, options.verb)))
    return 1 if said.get("audit_faults") else 0


def _carried_out(options: argparse.Namespace, config: ServiceConfig) -> dict[str, Any]:
    folder = Path(str(config.rollout.dir))
    try:
        store = RolloutStore(folder)
    except RolloutBusy as busy:
        said = _by_service(options, config, busy.url) | {"is_served": True}
    else:
        try:
            said = _by_folder(options, config, store)
        finally:
            store.close()
    if options.verb == "audit":
        said["audit_faults"] = audit_faults(folder)
    return said


def _by_folder(options: argparse.Namespace, config: ServiceConfig, store: RolloutStore) -> dict[str, Any]:
    """No service runs: what is written down holds from its next start."""
    state, now_s = store.state, time.time()
    if state.incumbent is not None:
        incumbent: str | Path = Path(state.incumbent.folder)
    else:
        incumbent = Path(config.bundle) if config.bundle is not None else config.dispatch.heuristic
    try:
        if options.verb == "start":
            gate, key = config.rollout.replay, read_key(config.rollout.evidence_key_file)
            evidence = replay_verdict(gate, options.bundle, options.evaluation, incumbent, options.incumbent_evaluation, key)
            candidate = store.adopt_bundle(options.bundle)
            moved = begun(state, candidate, configured_digest(config.bundle), secrets.token_hex(8), evidence, now_s)
            store.commit(moved, "start", OPERATOR, {"evidence": evidence})
        elif options.verb == "promote":
            if not options.force:
                raise RolloutError("no service runs, so no gate can be looked at; start it, or use --force")
            store.commit(promoted(state, len(config.rollout.canary), options.reason or "forced", now_s), "promote", OPERATOR)
        elif options.verb == "rollback":
            store.commit(rolled_back(state, options.reason or "asked for", now_s), "roll back", OPERATOR)
    except OSError as error:
        raise RolloutError(f"{store.folder}: {error.strerror}") from error
    return describe(store.state, config.rollout, incumbent) | {"is_running": False, "is_served": False, "audit": audit_shown(store.folder)}


def _by_service(options: argparse.Namespace, config: ServiceConfig, url: str) -> dict[str, Any]:
    if not url:
        raise RolloutError(f"{config.rollout.dir} is held by a process that does not say where it can be asked; try again in a moment")
    if options.verb == "start":
        files = {"bundle": options.bundle, "evaluation": options.evaluation, "incumbent_evaluation": options.incumbent_evaluation}
        return _asked(config, f"{url}/admin/rollout/start", {name: str(path.resolve()) for name, path in files.items() if path is not None})
    if options.verb == "promote":
        return _asked(config, f"{url}/admin/rollout/promote", {"force": options.force, "reason": options.reason})
    if options.verb == "rollback":
        return _asked(config, f"{url}/admin/rollout/rollback", {"reason": options.reason})
    return _asked(config, f"{url}/admin/rollout", None)


def _asked(config: ServiceConfig, url: str, order: dict[str, Any] | None) -> dict[str, Any]:
    import urllib.error  # here: the service's process, which imports this module too, does without
    import urllib.request

    request = urllib.request.Request(url, None if order is None else json.dumps(order).encode(), {"content-type": "application/json"})
    if config.gateway.api_keys:
        request.add_header("authorization", f"Bearer {config.gateway.api_keys[0]}")
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the service is on this machine
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return dict(json.loads(answer.read()))
    except urllib.error.HTTPError as error:
        try:
            message = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"HTTP {error.code}"
        raise RolloutError(message) from error
    except OSError as error:
        raise RolloutError(f"{url}: {error}") from error


def _lines(said: dict[str, Any], verb: str) -> list[str]:
    """What people read."""
    if verb == "audit":
        moves = [_move(entry) for entry in reversed(said["audit"])]
        return [*moves, *(f"FAULT {fault}" for fault in said["audit_faults"])] or ["no moves yet"]
    candidate = said.get("candidate")
    share = f", {said['share']:.0%} of users and sessions, half of the time" if said.get("share") else ""
    lines = [f"stage      {said['title']}{share}", f"candidate  {candidate['origin'] if candidate else 'none'}"]
    lines.append(f"incumbent  {said['incumbent']['kind']} {said['incumbent']['name']}")
    if said.get("reason"):
        lines.append(f"reason     {said['reason']}")
    for gate in said.get("gates", []):
        value = gate["value"] if not isinstance(gate["value"], float) else f"{gate['value']:.4g}"
        lines.append(
            f"  {'passed ' if gate['is_passed'] else 'waiting'} {gate['name']}: {'-' if value is None else value} (wanted {gate['wanted']})"
        )
    if said.get("next_move") == "promote" and not said["is_automatic"]:
        lines.append("next       every gate passed: `rollout promote`")
    if not said.get("is_running") and said["stage"] in ("shadow", "canary"):
        waited_for = "the candidate's process is starting" if said["is_served"] else "a service must run for the stage to go on"
        lines.append(f"next       {waited_for}")
    return lines


def _move(entry: dict[str, Any]) -> str:
    what = f"{entry['event']}: {entry['was']} -> {entry['stage']}"
    return (
        f"{entry['sequence']:>4}  {_time(entry['at_unix_s'])}  {what} by {entry['actor']}{': ' if entry['reason'] else ''}{entry['reason']}"
    )


def _time(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
