"""The replay gate in a process of its own: an evaluation file may have 64 MiB, and to parse it holds the interpreter for a second, in which
no stream of the service would get a token. `python -m runtime.rollout.examiner PARENT`: question on stdin, verdict on stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from runtime.rollout.evidence import read_key, replay_verdict
from runtime.rollout.settings import ReplayGate
from runtime.rollout.state import RolloutError
from runtime.torch_tp.parent_death import die_with_parent

EXAMINE_S = 45.0


async def examined(
    gate: ReplayGate, bundle: Path, evaluation: Path, incumbent: str | Path, incumbent_evaluation: Path | None, key_file: str | None
) -> dict[str, Any]:
    """What `replay_verdict` says, with the key in `key_file`. Raises: RolloutError, also when there is no verdict within EXAMINE_S."""
    question = {
        "gate": gate.model_dump(), "bundle": str(bundle), "evaluation": str(evaluation), "incumbent": str(incumbent),
        "incumbent_is_bundle": isinstance(incumbent, Path), "key_file": key_file,
        "incumbent_evaluation": None if incumbent_evaluation is None else str(incumbent_evaluation),
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "runtime.rollout.examiner", str(os.getpid()), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(EXAMINE_S):
            said, _ = await process.communicate(json.dumps(question).encode())
    except TimeoutError:
        raise RolloutError(f"{evaluation.name}: not examined within {EXAMINE_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer = json.loads(said)
        verdict, refusal = answer["verdict"], answer["refusal"]
    except (ValueError, KeyError, TypeError) as error:
        raise RolloutError(f"{evaluation.name}: its examination ended without a verdict (exit code {process.returncode})") from error
    if refusal is not None:
        raise RolloutError(str(refusal))
    return dict(verdict)


def main(arguments: list[str]) -> int:
    die_with_parent(int(arguments[0]))
    asked = json.loads(sys.stdin.buffer.read())
    incumbent, other = asked["incumbent"], asked["incumbent_evaluation"]
    verdict, refusal = None, None
    try:
        verdict = replay_verdict(
            ReplayGate(**asked["gate"]), Path(asked["bundle"]), Path(asked["evaluation"]),
            Path(incumbent) if asked["incumbent_is_bundle"] else incumbent, Path(other) if other is not None else None,
            read_key(asked["key_file"]),
        )  # fmt: skip
    except RolloutError as error:
        refusal = str(error)
    print(json.dumps({"verdict": verdict, "refusal": refusal}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
