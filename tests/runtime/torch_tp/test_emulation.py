"""An emulated device ends its stretches at deadlines that follow from its own CPU time."""

from __future__ import annotations

import time

import pytest

from runtime.torch_tp.emulation import CpuSample, SlowDown, verdict


class Clock:
    """A thread's CPU time and a wall clock that a test moves; sleeping moves the wall and ends `late_s` late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.cpu_s = self.wall_s = 0.0
        self.late_s = late_s

    def compute(self, cpu_s: float, taken_away_s: float = 0.0) -> None:
        self.cpu_s += cpu_s
        self.wall_s += cpu_s + taken_away_s

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds + self.late_s

    def slow_down(self, factor: float) -> SlowDown:
        return SlowDown(factor, thread_time_s=lambda: self.cpu_s, now_s=lambda: self.wall_s, sleep=self.sleep)


def test_a_stretch_takes_its_cpu_time_times_the_factor():
    clock = Clock()
    slow = clock.slow_down(4.0)
    slow.begin()
    clock.compute(0.010)
    assert slow.end() == pytest.approx(0.030)
    assert clock.wall_s == pytest.approx(0.040)


def test_time_that_others_took_is_not_multiplied():
    """10 ms of CPU time with 15 ms lost to another process: the device would have ended at 40 ms, so 15 ms are left to sleep."""
    clock = Clock()
    slow = clock.slow_down(4.0)
    slow.begin()
    clock.compute(0.010, taken_away_s=0.015)
    slow.end()
    assert clock.wall_s == pytest.approx(0.040)


def test_waiting_between_stretches_is_not_counted():
    clock = Clock()
    slow = clock.slow_down(2.0)
    slow.begin()
    clock.compute(0.001)
    slow.end()
    clock.compute(0.005)  # spinning in a collective
    slow.begin()
    clock.compute(0.001)
    slow.end()
    assert clock.wall_s == pytest.approx(0.002 + 0.005 + 0.002)


def test_sleeps_that_end_late_are_made_up_for():
    clock = Clock(late_s=0.0001)
    slow = clock.slow_down(3.0)
    slow.begin()
    for _ in range(100):
        clock.compute(0.001)
        slow.end()
    assert clock.wall_s == pytest.approx(0.300, abs=0.0002)


def test_a_long_stall_does_not_make_the_device_run_free():
    clock = Clock()
    slow = clock.slow_down(2.0)
    slow.begin()
    clock.compute(0.001, taken_away_s=1.0)
    slow.end()
    before_s = clock.wall_s
    for _ in range(10):
        clock.compute(0.001)
        slow.end()
    assert clock.wall_s - before_s >= 0.020 - slow.debt_s_max


def test_factor_one_never_sleeps_and_faster_is_refused():
    clock = Clock()
    slow = clock.slow_down(1.0)
    slow.begin()
    clock.compute(0.5)
    assert slow.end() == 0.0 and not slow.is_active
    with pytest.raises(ValueError, match="faster than this host"):
        clock.slow_down(0.5)


def test_on_the_real_clock_thread_time_sets_the_pace():
    """CPU-time ratio, not bare wall time: the stretch lasts at least factor x its own CPU time."""
    slow = SlowDown(3.0)
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    slow.begin()
    while time.thread_time() - cpu_s < 0.02:
        pass
    slow.end()
    assert time.perf_counter() - wall_s >= 3.0 * 0.02


def test_a_run_on_a_busy_machine_is_void(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 50 0 0 0 7 0\ncpu0 1 2 3\n")
    before = CpuSample.take(str(stat))
    stat.write_text("cpu  170 0 80 850 50 0 0 0 9 0\ncpu0 1 2 3\n")  # 100 busy of 150 jiffies; guest time is in user time
    after = CpuSample.take(str(stat))
    assert after.busy_fraction_since(before) == pytest.approx(100 / 150)
    judged = verdict(before, after, [1.0, 2.0])
    assert judged.is_void and "EMULATED slow_factor=1,2" in str(judged) and "VOID" in str(judged)
    assert not verdict(before, after, [1.0, 1.0]).is_void  # nothing emulated, nothing to void
    assert not verdict(before, before, [1.0, 2.0]).is_void
