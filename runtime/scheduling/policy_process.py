"""The process that evaluates a policy bundle, so that a stall in it holds up nobody: `python -m runtime.scheduling.policy_process`.

Reads questions from an inherited socket, answers each; numpy only. Ends with its parent.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import numpy as np

from agents.policy_bundle import BundleError, BundlePolicy, load_bundle
from envs.decision.actions import Decision
from envs.decision.observation import CONTEXT, FEATURES, OBSERVATION_VERSION
from runtime.frames import FrameCutter, frame
from runtime.scheduling import policy_messages as M
from runtime.torch_tp.parent_death import die_with_parent


def wanted_of(candidates: int, decision: Decision = "route") -> list[Any]:
    """What a bundle must read to be used with so many candidates: version, feature and context names, candidates, kind of decision."""
    return [OBSERVATION_VERSION, list(FEATURES), list(CONTEXT), candidates, decision]


def check_fits(policy: BundlePolicy, wanted: list[Any]) -> None:
    """Raises: BundleError unless the bundle reads what this program encodes."""
    version, features, context, candidates, decision = wanted
    schema = policy.schema
    if schema.decision_kind not in (decision, "joint"):
        raise BundleError(f"decides {schema.decision_kind}, not {decision}")
    if schema.observation_version != version:
        raise BundleError(f"observation_version is {schema.observation_version}, this program encodes {version}: train again")
    if list(schema.feature_names) != features or list(schema.context_names) != context:
        raise BundleError("features differ from this program's: export again")
    if schema.candidates_max < candidates:
        raise BundleError(f"takes at most {schema.candidates_max} candidates, the cluster needs {candidates}; never truncated")


def answer_of(policy: BundlePolicy, message: list[Any]) -> bytes:
    number, candidates, context, mask = M.read_question(message)
    try:
        outside = len(policy.out_of_range(candidates, context, mask))
        index, scores = policy.choose_scored(candidates, context, mask)
        return M.answer(number, index, outside, "", scores)
    except ValueError as error:  # the policy's own refusals are ValueErrors
        return M.answer(number, -1, 0, f"{type(error).__name__}: {error}")


def serve(connection: socket.socket, policy: BundlePolicy) -> None:
    cutter = FrameCutter()
    while data := connection.recv(1 << 16):
        for message in cutter.feed(data):
            connection.sendall(answer_of(policy, message))


def main(arguments: list[str]) -> int:
    descriptor, parent, bundle = int(arguments[0]), int(arguments[1]), arguments[2]
    die_with_parent(parent)
    connection = socket.socket(fileno=descriptor)
    cutter = FrameCutter()
    first: list[Any] = []
    while not first and (data := connection.recv(1 << 16)):
        first = next(iter(cutter.feed(data)), [])
    wanted, digest = first
    try:
        policy = load_bundle(bundle, digest=digest)
        check_fits(policy, wanted)
        features, context = len(policy.schema.feature_names), len(policy.schema.context_names)
        policy.scores(np.zeros((1, features), np.float32), np.zeros(context, np.float32), np.ones(1, np.bool_))  # warm
    except BundleError as error:
        connection.sendall(frame([M.REFUSED, str(error)]))
        return 2
    connection.sendall(frame([M.READY, os.getpid(), policy.digest]))
    serve(connection, policy)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
