"""A gateway's part that starts hosts, in a process of its own, for tests that end it: `python -m … MODEL`.

Starts two groups of two ranks and prints `up` and the ids of its nursery and of its hosts.
"""

from __future__ import annotations

import asyncio
import sys

from runtime.backends.host_starts import HostStarts
from tests.runtime.backends import backend_kinds


async def main(model: str) -> None:
    starts = HostStarts()
    backends = [backend_kinds.torch_tp(model, index, starts=starts) for index in range(2)]
    await asyncio.gather(*(backend.start() for backend in backends))
    print("up", starts.nursery_pid, *(backend.pid for backend in backends), flush=True)
    await asyncio.sleep(600.0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
