"""The step clock, by a clock that the test turns and by a device that exists on paper only."""

import time

import pytest
import torch

from dprc_lightning import timing
from dprc_lightning.timing import StepClock


class Turned:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


@pytest.fixture
def host(monkeypatch):
    turned = Turned()
    monkeypatch.setattr(timing, "time", turned)
    return turned


def test_the_phases_of_a_step_add_up_to_it(host):
    clock = StepClock()
    clock.start_step()
    host.spend(1)
    with clock.phase("forward"):
        host.spend(2)
    host.spend(4)
    with clock.phase("forward"):
        host.spend(8)
    clock.end_step()
    assert clock.last == {"other": 5, "forward": 10}
    assert clock.steps == [15] and clock.phases == {"other": 5, "forward": 10}


def test_a_phase_within_another_takes_its_time_away(host):
    clock = StepClock()
    clock.start_step()
    with clock.phase("optimizer"):
        host.spend(1)
        with clock.phase("noise"):
            host.spend(2)
            with clock.phase("reduce"):
                host.spend(4)
            host.spend(8)
        host.spend(16)
    clock.end_step()
    assert clock.last == {"other": 0, "optimizer": 17, "noise": 10, "reduce": 4}


def test_waiting_for_data_belongs_to_the_next_step_and_what_lies_between_to_none(host):
    def loader():
        for item in "abc":
            host.spend(3)
            yield item
        host.spend(50)

    clock, seen = StepClock(), []
    for item in clock.waiting(loader()):
        seen.append(item)
        clock.start_step()
        with clock.phase("forward"):
            host.spend(1)
        clock.end_step()
        assert clock.last == {"data": 3, "forward": 1, "other": 0}
        host.spend(1000)
    assert seen == ["a", "b", "c"] and clock.steps == [4, 4, 4]
    assert clock.phases["data"] == 9


def test_what_was_measured_elsewhere_can_be_added(host):
    clock = StepClock()
    clock.add("data", 2.5)
    clock.start_step()
    clock.end_step()
    assert clock.last == {"data": 2.5, "other": 0} and clock.steps == [2.5]


def test_a_step_that_broke_off_is_forgotten(host):
    clock = StepClock()
    clock.start_step()
    with pytest.raises(RuntimeError), clock.phase("forward"):
        host.spend(7)
        raise RuntimeError
    host.spend(7)
    clock.start_step()
    with clock.phase("forward"):
        host.spend(1)
    clock.end_step()
    clock.end_step()
    assert clock.last == {"forward": 1, "other": 0} and clock.steps == [1]


def test_a_step_that_broke_off_within_a_phase_of_the_next(host):
    clock = StepClock()
    clock.start_step()
    with clock.phase("forward"):
        clock.start_step()
        host.spend(1)
    clock.end_step()
    assert clock.last == {"other": 1}


def test_by_the_real_clock():
    clock = StepClock()
    started = time.perf_counter()
    clock.start_step()
    with clock.phase("forward"):
        time.sleep(0.02)
    clock.end_step()
    assert 0.02 <= clock.last["forward"] <= clock.steps[0] <= time.perf_counter() - started


def test_on_a_gpu_the_queue_tells_the_time(host, monkeypatch):
    """The device runs behind: its work takes 10 seconds where queueing takes one."""
    waited = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = 10 * host.now

        def synchronize(self):
            waited.append(self.at)

        def elapsed_time(self, end):
            assert waited, "an event may be read once it is over"
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(torch.device("cuda", 0))
    clock.add("data", 5)
    clock.start_step()
    with clock.phase("forward"):
        host.spend(2)
    host.spend(1)
    assert not waited
    clock.end_step()
    assert clock.last == {"data": 5, "forward": 20, "other": 10} and clock.steps == [35]
    assert waited == [1030], "once, for the last"
