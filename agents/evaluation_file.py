"""The evaluation file: results, the bundles they belong to, and a digest over both, optionally signed with a key.

It is what a rollout asks for before a policy may decide anything: the numbers, and proof that they are of this bundle and
were not edited since. The digest finds accidents; only the HMAC, with a key that the author of a change does not hold,
finds intent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.policy_bundle import bundle_digests
from agents.whole_files import read_plain_file, replace_file

__all__ = ["EvaluationFile", "EvaluationFileError", "bundle_digests", "read_evaluation_file"]

FORMAT_VERSION = 1
KEY_BYTES_MIN = 16
FILE_BYTES_MAX = 64 << 20
ROW_CHARS_MAX = 60
WRITTEN_BY = "give what `python -m agents.evaluate` wrote"


class EvaluationFileError(ValueError):
    """The file is not an evaluation, was changed, or is signed with another key; one line says which."""


@dataclass(frozen=True, slots=True)
class EvaluationFile:
    """results: `EvaluationResults` as a mapping. bundles: kind of decision -> SHA-256 of each of the bundle's files."""

    experiment: str
    results: Mapping[str, Any]
    comparisons: tuple[Mapping[str, Any], ...]
    bundles: Mapping[str, Mapping[str, str]]

    def _content(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "experiment": self.experiment,
            "bundles": {kind: dict(digests) for kind, digests in self.bundles.items()},
            "comparisons": [dict(row) for row in self.comparisons],
            "results": dict(self.results),
        }

    def write(self, path: Path, key: bytes | None = None) -> None:
        """Write the file in one step. Raises ValueError for a number that is not finite or a key that is too short."""
        content = self._content()
        data = _canonical(content)
        content["sha256"] = hashlib.sha256(data).hexdigest()
        content["hmac_sha256"] = None if key is None else _sign(data, key)
        replace_file(path, json.dumps(content, indent=1, allow_nan=False).encode())


def read_evaluation_file(path: Path, key: bytes | None = None) -> EvaluationFile:
    """Read and check an evaluation file; with a key it must be signed with that key. Raises EvaluationFileError."""
    try:
        content = json.loads(read_plain_file(path, FILE_BYTES_MAX).decode("utf-8"))
        _check_shape(path.name, content)
        claimed, signature = content.pop("sha256"), content.pop("hmac_sha256")
        data = _canonical(content)
    except EvaluationFileError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "no JSON in UTF-8"
        raise EvaluationFileError(f"{path.name}: not an evaluation file ({why}); {WRITTEN_BY}") from error
    found = EvaluationFile(content["experiment"], content["results"], tuple(content["comparisons"]), content["bundles"])
    if hashlib.sha256(data).hexdigest() != claimed:
        raise EvaluationFileError(f"{path.name}: its content differs from its digest; it was changed after it was written")
    if key is not None and not hmac.compare_digest(_sign(data, key), signature if isinstance(signature, str) else ""):
        raise EvaluationFileError(f"{path.name}: {'signed with another key' if signature else 'not signed'}; evaluate with --key-file")
    return found


def _check_shape(name: str, content: Any) -> None:
    """Raises: EvaluationFileError that names the first key that is not as `EvaluationFile.write` has it, with its value."""
    kinds = (
        (("sha256",), str), (("hmac_sha256",), str | None), (("format_version",), int), (("experiment",), str), (("bundles",), dict),
        (("comparisons",), list), (("results",), dict), (("results", "policies"), dict),
    )  # fmt: skip
    for keys, kind in kinds:
        value = content
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise EvaluationFileError(f"{name}: not an evaluation file ({'.'.join(keys)} is missing); {WRITTEN_BY}")
            value = value[key]
        if not isinstance(value, kind):
            raise EvaluationFileError(f"{name}: not an evaluation file ({'.'.join(keys)}: {reprlib.repr(value)}); {WRITTEN_BY}")
    if content["format_version"] != FORMAT_VERSION:
        raise EvaluationFileError(
            f"{name}: format_version: {content['format_version']}; this program reads {FORMAT_VERSION}: evaluate again"
        )
    for row, worlds in content["results"]["policies"].items():
        where = f"results.policies.{row[:ROW_CHARS_MAX]}"
        if not isinstance(worlds, list):
            raise EvaluationFileError(f"{name}: not an evaluation file ({where}: {reprlib.repr(worlds)}); {WRITTEN_BY}")
        for i, world in enumerate(worlds):
            goodput = world.get("goodput") if isinstance(world, dict) else None
            if type(goodput) not in (int, float) or not abs(goodput) <= sys.float_info.max:
                raise EvaluationFileError(f"{name}: {where}[{i}].goodput: {reprlib.repr(goodput)} is no finite number; {WRITTEN_BY}")


def _canonical(content: Mapping[str, Any]) -> bytes:
    """Bytes that depend on the values alone, not on spacing or order."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _sign(data: bytes, key: bytes) -> str:
    if len(key) < KEY_BYTES_MIN:
        raise ValueError(f"signing key of {len(key)} bytes; give at least {KEY_BYTES_MIN}, e.g. from `openssl rand -hex 32`")
    return hmac.new(key, data, hashlib.sha256).hexdigest()
