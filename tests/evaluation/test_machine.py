# SPDX-License-Identifier: Apache-2.0
"""What is known of the machine: whose the processors' time is, whether others left it to us, what it is."""

from __future__ import annotations

import pytest

from jgr.evaluation.machine import (
    BusyMachine,
    CpuTimes,
    Quiet,
    busy_ticks,
    cpu_times,
    machine,
    others_seconds,
    tree_ticks,
)


def test_busy_time_is_all_but_idle_and_waiting_for_disks() -> None:
    #        user nice system idle  iowait irq softirq steal guest guest_nice
    stat = "cpu  100 10   30     99999 777    2   3       5     0     0\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 5\n"
    assert busy_ticks(stat) == 150


def _stat(pid: int, parent: int, *ticks: int, name: str = "x") -> str:
    return f"{pid} ({name}) S {parent} 1 1 0 -1 0 0 0 0 0 {' '.join(map(str, ticks))} 20 0 1 0 5 0 0\n"


def test_the_process_tree_is_ours_with_children_that_ended() -> None:
    stats = [
        _stat(1, 0, 1000, 0, 0, 0),
        _stat(7, 1, 1, 2, 3, 4),
        _stat(9, 8, 20, 0, 0, 0, name="a) S 1 b"),
        _stat(8, 7, 100, 0, 0, 0),
        _stat(10, 1, 5000, 0, 0, 0),
    ]
    assert tree_ticks(stats, 7) == 130


def test_what_we_use_is_not_others() -> None:
    before = CpuTimes(busy_s=100.0, own_s=10.0, at_s=0.0)
    assert others_seconds(before, CpuTimes(103.0, 12.0, 2.0)) == 1.0
    assert others_seconds(before, CpuTimes(101.0, 12.0, 2.0)) == 0.0  # ticks are coarse


def test_this_process_is_found() -> None:
    sample = cpu_times()
    assert 0.0 < sample.own_s < sample.busy_s


class Machine:
    """A clock that sleep moves on, and others that keep so many cores busy in each second."""

    def __init__(self, *others: float) -> None:
        self.now = CpuTimes(0.0, 0.0, 0.0)
        self.others = iter(others)

    def sample(self) -> CpuTimes:
        return self.now

    def sleep(self, seconds: float) -> None:
        others_s = next(self.others) * seconds
        self.now = CpuTimes(self.now.busy_s + others_s + 1.0, self.now.own_s + 1.0, self.now.at_s + seconds)


def test_timing_waits_for_the_first_quiet_second() -> None:
    machine = Machine(1.5, 0.3, 0.05, 9.0)
    assert Quiet(10.0, machine.sample, machine.sleep).wait().at_s == 3.0


def test_a_disturbed_round_does_not_count() -> None:
    machine = Machine(0.0, 0.1, 0.1, 0.0, 0.6)
    quiet = Quiet(10.0, machine.sample, machine.sleep)
    start = quiet.wait()
    machine.sleep(2.0)
    assert quiet.was_quiet_since(start)
    start = quiet.wait()
    machine.sleep(1.0)
    machine.sleep(1.0)
    assert not quiet.was_quiet_since(start)


def test_timing_is_refused_once_too_much_was_lost() -> None:
    machine = Machine(*[1.5] * 20)
    with pytest.raises(BusyMachine, match=r"keep 1\.50 cores busy .* 10 s were lost"):
        Quiet(10.0, machine.sample, machine.sleep).wait()
    machine = Machine(*[0.0, 1.5] * 20)
    quiet = Quiet(3.0, machine.sample, machine.sleep)
    with pytest.raises(BusyMachine, match=r"3 s were lost"):
        for _ in range(3):
            start = quiet.wait()
            machine.sleep(1.0)
            quiet.was_quiet_since(start)
    assert machine.now.at_s == 6.0


def test_machine_is_described_without_its_name() -> None:
    described = machine()
    assert described.keys() == {"cpu", "instructions", "cores", "memory_gib", "os"}
    assert described["cores"] >= 1
    assert described["memory_gib"] >= 1
