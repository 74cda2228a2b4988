"""Times of steps are those of the device, one step late, and the host never waits for the step that it just sent."""

import pytest
import torch

from flodl.train.step.host import StepTimer


class Clock:
    """A device whose events are done when somebody waits for them."""

    def __init__(self):
        self.now, self.waited = 0.0, []

    def event(self, enable_timing):
        clock = self

        class Event:
            def record(self):
                self.at = clock.now

            def synchronize(self):
                clock.waited.append(self.at)

            def elapsed_time(self, end):
                return end.at - self.at

        return Event()


def test_a_step_is_known_when_the_next_one_has_been_sent(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    times = StepTimer(torch.device("cuda"))
    told = []
    for took in (5.0, 7.0, 11.0, 13.0):
        with times:
            clock.now += took
        told.append(times.take_previous())
        clock.now += 100.0  # what lies between steps is no step's time
    assert told == [5.0, 5.0, 7.0, 11.0]
    assert clock.waited == [5.0, 5.0, 112.0, 223.0]


@pytest.mark.gpu
def test_a_device_has_the_next_step_before_the_last_is_over():
    times = StepTimer(torch.device("cuda"))
    a = torch.randn(4096, 4096, device="cuda")
    open_ = []
    for _ in range(4):
        with times:
            for _ in range(20):
                a @ a
        done = torch.cuda.Event()
        done.record()
        assert times.take_previous() > 0
        open_.append(not done.query())
    assert open_[1:] == [True] * 3
