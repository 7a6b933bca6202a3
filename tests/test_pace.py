"""Pace: the next step is launched as late as the previous one allows."""

import random
from types import SimpleNamespace

import pytest

from rooftile.engine import pace
from rooftile.engine.pace import Pace


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: self.now))


class Device:
    """Steps that take as long as they say, one after another, and a host that needs `launch` seconds for each."""

    def __init__(self, clock, launch=0.001):
        self.clock, self.launch, self.free = clock, launch, clock.now
        self.pace, self.unread, self.idle, self.dues = Pace(), None, 0.0, []

    def ahead(self, prompts=False):
        """How long before the end of the step that runs the next one is to be launched."""
        return self.unread.ends - self.pace.plan(prompts)

    def step(self, shape, seconds, delay=0.0, read_late=0.0, prompts=False, launch=None, comes_late=False, woken=0.0):
        """Launch a step when it is due, `delay` seconds too late, and read the previous one, `woken` after its end.

        With `comes_late`, its prompts come when it would be due without them.
        """
        clock, previous = self.clock, self.unread
        if comes_late:
            clock.now = max(clock.now, self.pace.plan(False))
        self.dues.append(self.pace.plan(prompts))
        clock.now = max(clock.now, self.dues[-1]) + delay
        since = clock.now
        clock.now += launch or self.launch
        began = max(clock.now, self.free)
        self.idle, self.free = began - self.free, began + seconds
        ends = self.free
        step = SimpleNamespace(shape=shape, ended=None, follows=None, ends=ends)
        step.seconds_since = lambda earlier: ends - earlier.ends
        if previous is not None:
            previous.done = previous.ends <= clock.now
        self.pace.launched(step, previous, since, prompts)
        self.unread = step
        if previous is not None:
            clock.now += read_late
            if clock.now < previous.ends:
                clock.now = previous.ended = previous.ends + woken
            self.pace.read(previous, step)


@pytest.fixture
def device(monkeypatch):
    return Device(Clock(monkeypatch))


def test_a_step_is_launched_late_and_the_device_never_waits(device):
    for _ in range(300):
        device.step("decode", 0.005)
    for _ in range(50):
        device.step("decode", 0.005)
        assert device.idle == 0.0
        # Most of the step's time is left for requests to come.
        assert device.ahead() == pytest.approx(device.launch + pace._SLACK, rel=0.05)


def test_steps_of_unknown_length_are_launched_at_once(device):
    for _ in range(300):
        device.step(None, 0.005)
    assert set(device.dues) == {0.0}
    device.step("new", 0.005)
    device.step("new", 0.005)
    assert set(device.dues) == {0.0}  # one step tells nothing


def test_the_shortest_of_the_recent_steps_of_the_shape_is_expected(device):
    for _ in range(300):
        device.step("decode", 0.005)
        device.step("mixed", 0.012)
    device.step("mixed", 0.03)
    for shape, expected in (("mixed", 0.012), ("decode", 0.005)):
        device.step(shape, 0.04)  # the one before is read, and this one has begun
        assert 0.04 - device.ahead() == pytest.approx(expected - device.launch - pace._SLACK, rel=0.05)


def test_steps_that_are_no_longer_than_their_launch_are_launched_at_once(device):
    for _ in range(300):
        device.step("decode", 0.0012)
    assert all(due <= device.clock.now for due in device.dues[-50:])
    assert device.idle == 0.0


def test_a_host_that_was_late_leaves_more_time_and_forgets_it(device):
    for _ in range(300):
        device.step("decode", 0.005)
    device.step("decode", 0.005, delay=0.002)  # another thread held the interpreter
    assert device.idle > 0
    device.step("decode", 0.005)
    device.step("decode", 0.005, delay=0.001)
    assert device.idle == 0.0, "a shorter delay is expected now"
    for _ in range(100):
        device.step("decode", 0.005)
    assert device.ahead() < 1.2 * (device.launch + pace._SLACK)


@pytest.mark.parametrize("prompts", [False, True])
def test_where_other_threads_often_delay_the_host_the_device_hardly_ever_waits(device, prompts):
    delays, idle = random.Random(0), []
    for _ in range(1000):
        # Both the launch and the read, by which the end of the next step is predicted.
        delay, woken = delays.uniform(0, 0.004), delays.uniform(0, 0.004)
        device.step("step", 0.01, delay, prompts=prompts, woken=woken)
        idle.append(device.idle)
    assert sum(idle) < 0.01 * 1000 * 0.01
    assert device.ahead(prompts) > device.launch + 0.004


def test_a_launch_of_many_kernels_is_in_time(device):
    for n in range(300):
        device.step("eager", 0.04, launch=0.025)
        assert n < 2 or device.idle == 0.0


def test_where_the_host_did_not_wait_for_a_step_the_next_one_is_launched_at_once(device):
    for _ in range(300):
        device.step("decode", 0.005)
    device.step("decode", 0.005, read_late=0.004)
    assert device.pace.plan(False) == 0.0


def test_a_wrong_prediction_leaves_more_time(device):
    for _ in range(300):
        device.step("decode", 0.005)
    before = device.pace._needed[False]
    for _ in range(2):
        device.step("decode", 0.003)  # shorter than any before
    assert device.idle > 0, "as if by the wrong prediction"
    assert device.pace._needed[False] >= 2 * pace._KEPT * before


def test_prompts_are_launched_earlier_and_do_not_make_other_steps_early(device):
    for _ in range(300):
        device.step("decode", 0.005)
        device.step("mixed", 0.006, prompts=True, launch=0.003)
    device.step("decode", 0.005)
    assert device.idle == 0.0
    assert device.ahead(True) == pytest.approx(0.003 + pace._SLACK, rel=0.05)
    assert device.ahead(False) == pytest.approx(0.001 + pace._SLACK, rel=0.05)


def test_a_prompt_that_comes_late_is_no_wrong_prediction(device):
    for _ in range(300):
        device.step("decode", 0.005)
        device.step("mixed", 0.006, prompts=True, launch=0.003)
    device.step("decode", 0.005)
    device.step("mixed", 0.006, prompts=True, launch=0.003, comes_late=True)
    assert device.idle > 0
    device.step("decode", 0.005)
    device.step("decode", 0.005)
    assert device.ahead(True) == pytest.approx(0.003 + pace._SLACK, rel=0.05)
