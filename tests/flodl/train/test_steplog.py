"""What is told of steps in windows: figures in order, and the time of one step, not of the window."""

from types import SimpleNamespace

import pytest
import torch

from flodl.train import StepDone, steplog
from flodl.train.events import Events
from flodl.train.step.outcome import Outcome, StepResult
from flodl.train.steplog import StepLog, Tally

RATES = SimpleNamespace(first=0.1)


def done(loss):
    row = torch.tensor([loss, 0.5], dtype=torch.float64)
    return StepResult(float("nan"), 0.0, 4, float("nan"), 0.0, outcome=Outcome(row, 4.0))


def told(log, events, count):
    found, tally = [], Tally()
    events.subscribe(found.append, StepDone)
    for number in range(count):
        log.note(tally, done(float(number)), step=number + 1, epoch=0, rates=RATES, wall_ms=10.0 + number)
    log.settle(tally)
    return found, tally


def test_the_time_of_a_step_is_its_part_of_the_window():
    events = Events()
    found, tally = told(StepLog(events, every=4, on_nan="stop"), events, 6)
    assert [event.loss for event in found] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [event.compute_ms for event in found] == pytest.approx([11.5] * 4 + [14.5] * 2)
    assert tally.compute_ms == pytest.approx(sum(range(10, 16)))


class Clock:
    """Stands in for a device: each event notes a time that goes on by 12 ms."""

    now = 0.0

    def __init__(self, **_):
        self.at = 0.0

    def record(self):
        Clock.now += 12.0
        self.at = Clock.now

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


def test_so_it_is_where_a_device_tells_the_time(monkeypatch):
    window = steplog._Window

    class OnDevice(window):
        def __init__(self, entries, start):
            super().__init__(entries, start)
            self.end = Clock()
            self.end.record()

    monkeypatch.setattr(steplog, "_Window", OnDevice)
    events = Events()
    log = StepLog(events, every=3, on_nan="stop")
    log._start = Clock()
    log._start.record()
    found, tally = told(log, events, 6)
    assert [event.compute_ms for event in found] == pytest.approx([4.0] * 6)
    assert tally.compute_ms == pytest.approx(24.0)
