"""Over emulated groups in virtual time: asked for five times what it can serve, the service serves as much as ever, in time."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import virtual_time
from benchmarks.overload import Slice, serve

CAPACITY_PER_S = 8.0  # `python -m benchmarks.overload` finds 8.4


def test_goodput_holds_at_five_times_capacity():
    def play(multiple: float, sheds: bool):
        return virtual_time.run(serve("unlike-3", Slice(multiple * CAPACITY_PER_S, sheds, 1, 8.0, 12.0)))

    calm, rush, unshed = play(1.0, True), play(5.0, True), play(5.0, False)
    assert calm.goodput_per_s >= 0.95 * calm.asked_per_s and not any(end == "overloaded" for _, end in calm.ends)
    assert rush.goodput_per_s >= 0.95 * calm.goodput_per_s
    assert unshed.goodput_per_s < 0.3 * calm.goodput_per_s, "else nothing was there to be mended"
    share = {name: rush.ends[name, "good"] / sum(n for (other, _), n in rush.ends.items() if other == name) for name, _ in rush.ends}
    assert share["code"] > share["chat"] > share["batch"] or share["chat"] == share["batch"] == 0.0


def test_virtual_time_passes_at_once_and_in_order():
    async def body() -> tuple[float, list[str]]:
        loop, order = asyncio.get_running_loop(), []

        async def after(wait_s: float, name: str) -> None:
            await asyncio.sleep(wait_s)
            order.append(name)

        began_s = loop.time()
        await asyncio.gather(after(3600.0, "late"), after(1.0, "soon"))
        return loop.time() - began_s, order

    passed_s, order = virtual_time.run(body())
    assert passed_s == pytest.approx(3600.0, abs=1e-3) and order == ["soon", "late"]
