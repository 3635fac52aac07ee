"""The emulated group keeps the kernel's times: what virtual time says of a batch happens in real time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from envs.decision import predictor as P
from envs.group_kernel import layout as L
from envs.group_kernel.advance import join
from runtime.backends.emulated import EmulatedBackend
from runtime.backends.emulated_kernel import KernelSettings, kernel_of
from runtime.backends.interface import Begun
from runtime.backends.kernel_report import KernelReader
from tests.runtime.scheduling.service_parts import LIMITS, call, cluster, until

PROMPTS = (200, 900, 50)
TOKENS = 12


def virtual_times() -> list[tuple[float, float]]:
    """First and last token of three calls that come one after the other within 2 ms, by the kernel's own clock."""
    group = cluster(1).groups[0]
    state = kernel_of(group, LIMITS, KernelSettings(), 0.0)
    limits = P.class_limits()[0]
    reader = KernelReader(state)
    for request, prompt in enumerate(PROMPTS):
        reader.advance(1e-3 * request)  # one after the other: the first one's step begins without the others
        join(state, 0, 1e-3 * request, request, 0, prompt, TOKENS, 0.0, P.queue_key(0.0, 0, 2.0), limits[2])
    reader.advance(60.0)
    count = int(state.record_count[0])
    order = np.argsort(state.record_int[:count, L.RI_REQUEST])
    return [(float(state.record_float[i, L.RF_FIRST_S]), float(state.record_float[i, L.RF_FINISH_S])) for i in order]


def test_real_time_is_the_kernels_time(kernels):
    """Within 25 ms plus 5 %, which is what a shared machine adds: the waking of the event loop. One that stood still for longer is asked
    again; nothing ever comes early."""
    expected = virtual_times()

    async def body():
        backend = EmulatedBackend(cluster(1).groups[0], 0, LIMITS)
        await backend.start()
        try:
            warm = [piece async for piece in backend.submit(call(max_tokens=2))]
            assert len(warm) == 2
            began_s = time.monotonic()

            async def one(prompt: int) -> tuple[float, float]:
                stamps = []
                async for _ in backend.submit(call(prompt, TOKENS, ignore_eos=True)):
                    stamps.append(time.monotonic() - began_s)
                return stamps[0], stamps[-1]

            return await asyncio.gather(*(one(prompt) for prompt in PROMPTS))
        finally:
            await backend.close()

    seen = np.full((len(PROMPTS), 2), np.inf)
    for _ in range(20):
        seen = np.minimum(seen, asyncio.run(body()))
        if seen == pytest.approx(np.array(expected), rel=0.05, abs=0.025):
            return
    raise AssertionError(f"{seen} instead of {expected}")


def test_slow_ranks_show_in_reports(kernels):
    """Memory twice as slow in mid-stream: the reported rank times double."""

    async def body():
        backend = EmulatedBackend(cluster(1).groups[0], 0, LIMITS)
        await backend.start()
        stream = backend.submit(call(max_tokens=400, ignore_eos=True))
        try:
            await anext(stream)
            before = backend.report().rank_times
            backend.slow_down([1.0], [2.0])
            await until(lambda: backend.report().rank_times.mlp_s[0] > 1.5 * before.mlp_s[0])
            after = backend.report().rank_times
            assert after.mlp_s[0] == pytest.approx(2 * before.mlp_s[0], rel=0.05)
        finally:
            await stream.aclose()
            await backend.close()

    asyncio.run(body())


def test_a_call_that_waited_elsewhere_is_served_before_later_ones(kernels):
    """One place; the call that comes last has waited 100 s in another group: it runs before those that wait here."""

    async def body() -> None:
        clock_s = [5000.0]  # stands still while they come
        backend = EmulatedBackend(cluster(1).groups[0], 0, replace(LIMITS, max_running=1), KernelSettings(), lambda: clock_s[0])
        await backend.start()
        ended: list[int] = []

        async def ask(number: int, begun: Begun) -> None:
            async for _ in backend.submit(call(8, 10, ignore_eos=True), begun):
                pass
            ended.append(number)

        tasks = []
        for number, waited_s in enumerate((0.0, 0.0, 100.0)):
            tasks.append(asyncio.create_task(ask(number, Begun(waited_s=waited_s))))
            clock_s[0] += 0.001
            await asyncio.sleep(0)
            backend.report()
        while not all(task.done() for task in tasks):
            clock_s[0] += 0.1
            backend.report()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        await backend.close()
        assert ended == [0, 2, 1]

    asyncio.run(body())
