"""Which arm each user and session of a canary has, as it is put down beside the rollout's state and read again after a restart.

Keys are the salted digests that the switchback draws, so no name is in the file; of another rollout (another salt) it says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from runtime.rollout.state import InconsistentState


class KeptArm(msgspec.Struct, frozen=True, array_like=True):
    """key: digest of a user or session. seen_unix_s: its last call."""

    key: str
    arm: str
    seen_unix_s: float


class ArmsFile(msgspec.Struct, frozen=True):
    salt: str
    arms: list[KeptArm]


def written(salt: str, arms: Iterable[tuple[int, str, float]]) -> bytes:
    """The file's content, of (key, arm, Unix time of the last call), the longest silent first."""
    return msgspec.json.encode(ArmsFile(salt, [KeptArm(f"{key:016x}", arm, round(seen_s, 3)) for key, arm, seen_s in arms]))


def read(data: bytes, salt: str) -> list[tuple[int, str, float]]:
    """The same again; [] of another rollout's. Raises: InconsistentState for what is no such file."""
    try:
        found = msgspec.json.decode(data, type=ArmsFile)
        return [(int(arm.key, 16), arm.arm, arm.seen_unix_s) for arm in found.arms] if found.salt == salt else []
    except (ValueError, RecursionError) as error:
        raise InconsistentState(f"not the arms of a rollout ({error})") from error
