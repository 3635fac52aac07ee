"""The rollout's folder: its state, replaced in one step; its audit log, only ever added to; copies of the bundles in use; and a lock.

A kill at any moment leaves the state before a move or after it, whole, and the audit log with a line for every move: the state carries the
line of its own move, which is added to the log afterwards, and once more on opening should the log lack it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from agents.policy_bundle import WEIGHTS_BYTES_MAX, BundleError, bundle_digest, bundle_digests
from agents.whole_files import read_plain_file, replace_file, sync_folder
from runtime.rollout import kept_arms
from runtime.rollout.state import FORMAT_VERSION, BundleName, InconsistentState, RolloutError, RolloutState

STATE_FILE, AUDIT_FILE, ARMS_FILE, LOCK_FILE, BUNDLES = "rollout.json", "audit.jsonl", "arms.json", "lock", "bundles"
TAIL_BYTES = 1 << 16
STATE_BYTES_MAX = 4 << 20


class RolloutBusy(RolloutError):
    """Another process holds the folder; `url` is where it can be asked, "" if it does not say."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(f"{folder} is in use by the service at {url or 'an unknown address'}")
        self.url = url


class RolloutStore:
    """The folder, held by this process until `close`. Not for several threads at once."""

    def __init__(self, folder: Path, unix_s: Callable[[], float] = time.time) -> None:
        """Raises: RolloutBusy; RolloutError when the folder or its state cannot be used."""
        self.folder, self._unix_s = folder, unix_s
        try:
            (folder / BUNDLES).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise RolloutError(f"rollout.dir: {folder}: {error.strerror}; give a folder that can be written") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            url = os.pread(self._lock, 4096, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise RolloutBusy(folder, url) from None
        try:
            os.ftruncate(self._lock, 0)
            for name in (STATE_FILE, ARMS_FILE):
                for left in folder.glob(f".{name}.*"):  # of a kill amid a write
                    left.unlink()
            self.state = read_state(folder)
            self._repair_audit()
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        os.close(self._lock)

    def say_url(self, url: str) -> None:
        """Where others can ask for what they may not do themselves."""
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, url.encode(), 0)

    # --- state --------------------------------------------------------------------------------------------------------------

    def commit(self, state: RolloutState, event: str, actor: str, detail: dict[str, Any] | None = None) -> RolloutState:
        """Make a move: on return it outlives any crash. Raises: OSError; the old state then holds."""
        sequence = self.state.sequence + 1
        entry = {
            "sequence": sequence, "at_unix_s": round(self._unix_s(), 3), "event": event, "actor": actor, "stage": state.title,
            "was": self.state.title, "candidate": state.candidate.digest if state.candidate else None, "reason": state.reason,
            **(detail or {}), "previous": hashlib.sha256(self.state.entry.encode()).hexdigest(),
        }  # fmt: skip
        state = msgspec.structs.replace(state, sequence=sequence, entry=json.dumps(entry, allow_nan=False))
        self._write(state)
        self._append(state.entry)
        return state

    def put_down(self, state: RolloutState) -> None:
        """Keep counts of the stage under way; no move, no line in the log. Raises: OSError."""
        self._write(state)

    def put_down_arms(self, arms: list[tuple[int, str, float]]) -> None:
        """Who has which arm, and for how many seconds each was silent. Raises: OSError."""
        now_s = self._unix_s()
        rows = [(key, arm, now_s - silent_s) for key, arm, silent_s in arms]
        replace_file(self.folder / ARMS_FILE, kept_arms.written(self.state.salt, rows))

    def arms(self) -> list[tuple[int, str, float]]:
        """What was put down in this rollout; [] where nothing was. Raises: OSError, InconsistentState for a file that cannot be read."""
        try:
            data = read_plain_file(self.folder / ARMS_FILE, STATE_BYTES_MAX)
        except FileNotFoundError:
            return []
        now_s = self._unix_s()
        return [(key, arm, now_s - seen_s) for key, arm, seen_s in kept_arms.read(data, self.state.salt)]

    def _write(self, state: RolloutState) -> None:
        replace_file(self.folder / STATE_FILE, msgspec.json.format(msgspec.json.encode(state), indent=1))
        self.state = state

    # --- audit log ----------------------------------------------------------------------------------------------------------

    def _append(self, entry: str) -> None:
        """One write, forced to disk; what a kill left unfinished before it is closed off, never taken away."""
        path = self.folder / AUDIT_FILE
        is_new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            size = os.fstat(descriptor).st_size
            is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, (b"\n" if is_torn else b"") + entry.encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            sync_folder(self.folder)

    def _repair_audit(self) -> None:
        if self.state.entry and self.state.entry not in audit_tail(self.folder, 4):
            self._append(self.state.entry)

    # --- bundles ------------------------------------------------------------------------------------------------------------

    def adopt_bundle(self, origin: Path) -> BundleName:
        """A copy of our own, so that nobody changes a bundle under a rollout. Raises: RolloutError."""
        try:
            digest = bundle_digest(origin)
            target = self.folder / BUNDLES / digest[:16]
            if not target.exists():
                temporary = Path(f"{target}.new")
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                for file in bundle_digests(origin):
                    replace_file(temporary / file, read_plain_file(origin / file, WEIGHTS_BYTES_MAX))
                os.rename(temporary, target)
                sync_folder(target.parent)
        except (OSError, BundleError) as error:
            raise RolloutError(f"{origin}: bundle cannot be copied ({error})") from error
        name = BundleName(str(target), str(origin), digest)
        check_bundle(name)
        return name


def read_state(folder: Path) -> RolloutState:
    """The state in a rollout's folder; of an empty one, `idle`. Raises: RolloutError."""
    path = folder / STATE_FILE
    try:
        state = msgspec.json.decode(read_plain_file(path, STATE_BYTES_MAX), type=RolloutState)
        if state.format_version != FORMAT_VERSION:
            raise RolloutError(f"{path}: format_version={state.format_version}; this program reads {FORMAT_VERSION}")
        state.check()
    except FileNotFoundError:
        return RolloutState()
    except (OSError, RecursionError, msgspec.MsgspecError, InconsistentState) as error:
        raise RolloutError(f"{path}: not a rollout's state ({error}); move it away to begin anew") from error
    return state


def configured_digest(bundle: str | None) -> str:
    """Of the service file's bundle: "" for none, and for one that cannot be read."""
    try:
        return bundle_digest(Path(bundle)) if bundle is not None else ""
    except OSError:
        return ""


def check_bundle(name: BundleName) -> None:
    """Raises: RolloutError unless our copy is there and unchanged."""
    try:
        is_same = bundle_digest(Path(name.folder)) == name.digest
    except OSError as error:
        raise RolloutError(f"{name.folder}: the copy of {name.origin} is gone ({error.strerror})") from error
    if not is_same:
        raise RolloutError(f"{name.folder}: the copy of {name.origin} was changed")


def audit_tail(folder: Path, lines: int) -> list[str]:
    """The last whole lines of the audit log, oldest first."""
    try:
        with (folder / AUDIT_FILE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except FileNotFoundError:
        return []
    whole, _, _ = data.rpartition(b"\n")
    return [line.decode(errors="replace") for line in whole.split(b"\n")[-lines:]] if whole else []


def audit_faults(folder: Path) -> list[str]:
    """What is wrong with the audit log: lines that are not its own, or that do not follow the line before; [] for a sound one."""
    faults, before, sequence = [], "", 0
    try:
        text = (folder / AUDIT_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = json.loads(line)
            found, previous = int(entry["sequence"]), str(entry["previous"])
        except (ValueError, KeyError, TypeError):
            faults.append(f"line {number}: unfinished or not an entry")
            continue
        if line == before:
            continue
        if found != sequence + 1 or previous != hashlib.sha256(before.encode()).hexdigest():
            faults.append(f"line {number}: entry {found} does not follow entry {sequence}")
        before, sequence = line, found
    return faults
