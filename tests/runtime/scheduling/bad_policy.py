"""A policy process that does harm, for tests: `python bad_policy.py KIND FD PARENT BUNDLE`; KIND may change by a file's content."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import numpy as np

from runtime.frames import FrameCutter, frame
from runtime.scheduling import policy_messages as M
from runtime.torch_tp.parent_death import die_with_parent

SLOW_S = 1.5  # longer than the tests' deadline, and short enough not to be taken for stuck


def main(kind_file: Path, descriptor: int, parent: int) -> None:
    die_with_parent(parent)
    connection = socket.socket(fileno=descriptor)
    cutter = FrameCutter()
    is_told = False
    while data := connection.recv(1 << 16):
        for message in cutter.feed(data):
            if not is_told:
                is_told = True
                connection.sendall(frame([M.READY, 0, "none"]))
                continue
            number, _, _, mask = M.read_question(message)
            kind = kind_file.read_text().strip()
            if kind == "stall":
                while kind_file.read_text().strip() == "stall":  # a busy loop
                    pass
            elif kind == "slow":
                time.sleep(SLOW_S)
            elif kind == "exit":
                sys.exit(3)
            elif kind == "garbage":
                connection.sendall(b"\xff\xff\xff\xff nonsense")
                continue
            good = int(np.flatnonzero(mask)[0])
            refuse = len(mask) - 1
            index = {"refuse": refuse, "illegal": int(np.flatnonzero(~mask)[0]) if (~mask).any() else 9999, "range": 9999, "shape": -5}.get(
                kind, good
            )
            error = {"exception": "RuntimeError: boom", "nan": "NonFiniteScores: a score is not finite"}.get(kind, "")
            connection.sendall(M.answer(number, -1 if error else index, 0, error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
