"""A GPU's clock, by events that behave as CUDA's do: known later, in 32-bit milliseconds."""

import struct
import time

import pytest

from pipeswift_lightning.plan.timeline import EventKind
from pipeswift_lightning.runtime.device_clock import DeviceClock
from pipeswift_lightning.runtime.recorder import Recorder


class Device:
    """A stream that lags behind the host."""

    def __init__(self) -> None:
        self.now_ms = 1e7  # for hours
        self.waits = 0

    def event(self) -> "Mark":
        return Mark(self)


class Mark:
    def __init__(self, device: Device) -> None:
        self._device, self._at_ms = device, 0.0

    def record(self) -> None:
        self._at_ms = self._device.now_ms

    def synchronize(self) -> None:
        self._device.waits += 1

    def elapsed_time(self, end_event: "Mark") -> float:
        (value,) = struct.unpack("f", struct.pack("f", end_event._at_ms - self._at_ms))
        return value


def test_times_are_the_devices_on_the_hosts_clock_from_step_to_step() -> None:
    device = Device()
    recorder = Recorder(1, clock=DeviceClock(device.event))
    host_s = time.perf_counter()
    start_ms = device.now_ms
    for _ in range(3):
        recorder.begin()
        start = recorder.now()
        device.now_ms += 2.5
        recorder.add(EventKind.FORWARD, 1, 0, start, recorder.now())
        device.now_ms += 1e6 / 3  # a step of minutes
    recorder.add(EventKind.DATA_WAIT, 1, None, host_s, host_s + 1.0)
    forward, wait = recorder.events()
    assert forward.duration_s == pytest.approx(2.5e-3, abs=1e-6)
    passed_s = 1e-3 * (device.now_ms - start_ms - 1e6 / 3 - 2.5)
    assert forward.start_s - host_s == pytest.approx(passed_s, abs=0.5)
    assert (wait.start_s, wait.duration_s) == (host_s, 1.0)  # the host's own


def test_nothing_waits_for_the_device_until_it_is_asked() -> None:
    device = Device()
    recorder = Recorder(0, clock=DeviceClock(device.event))
    recorder.begin()
    assert device.waits == 1  # once, to set its clock
    for _ in range(5):
        recorder.add(EventKind.FORWARD, 0, 0, recorder.now(), recorder.now())
    assert device.waits == 1
    record = recorder.step
    recorder.begin()
    assert len(record.events()) == 5  # the step before can still be looked at
    assert recorder.events() == ()


def test_a_step_that_is_looked_at_late_took_as_long() -> None:
    device = Device()
    recorder = Recorder(0, clock=DeviceClock(device.event))
    recorder.begin()
    for kind in (EventKind.FORWARD, EventKind.RECEIVE_WAIT, EventKind.BACKWARD):
        start = recorder.now()
        device.now_ms += 0.125
        recorder.add(kind, 0, 0, start, recorder.now())
    record, step_s = recorder.step, 3 * 0.125e-3
    for _ in range(2):
        device.now_ms += 1e7 / 3  # hours of validation
        recorder.begin()
    computed = record.computed()
    assert computed is not None
    assert computed[1] - computed[0] == pytest.approx(step_s, abs=1.0)  # to a float of hours
    assert computed[2] == pytest.approx(2 * 0.125e-3, abs=1e-9)
    assert recorder.step.computed() is None


def test_an_instant_before_the_first_step_has_no_time() -> None:
    clock = DeviceClock(Device().event)
    with pytest.raises(RuntimeError, match=r"call begin\(\) first"):
        clock.seconds(clock.now())
