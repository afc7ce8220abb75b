"""Seconds of a list of kernel calls: as one CUDA graph on a GPU, by the clock on a processor."""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from bitmtp_tvm.device import call_driver

Call = Callable[[], Any]

LEAST_REPLAYS = 7
MOST_REPLAYS = 60
SECONDS = 0.02
"""A timing ends after so long, but not before LEAST_REPLAYS."""

# Of the driver's interface.
_RELAXED = 2
_NON_BLOCKING = 1
_EVENT_DEFAULT = 0


class Timer(Protocol):
    """What times calls on a kind of device."""

    def seconds(self, calls: Sequence[Call], replays: int = 0) -> float:
        """Median seconds of all `calls` one after the other, warm: each has run before.

        `replays`: how often, 0 for as often as a short while allows.
        """

    def sync(self) -> None:
        """Wait for the device. Raises where something that ran on it has failed."""


class HostTimer:
    """Times calls that are over when they return."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def seconds(self, calls: Sequence[Call], replays: int = 0) -> float:
        def once() -> float:
            start = self._clock()
            for call in calls:
                call()
            return self._clock() - start

        return _median(once, replays, self._clock)

    def sync(self) -> None:
        pass


class CudaTimer:
    """Times calls of TVM's kernels as one graph, so that no host stands between two of them.

    TVM launches into the stream that is current; while a graph is made that is one of our own,
    because the default stream cannot be captured. The driver is asked itself: it is in the process
    whatever CUDA runtime TVM is linked against.
    """

    def __init__(self, device: Any) -> None:
        """`device`: TVM's, with a context (something was allocated on it)."""
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)
        self._events = [self._event(), self._event()]

    def _event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _EVENT_DEFAULT)
        return event

    def _call(self, name: str, *arguments: object) -> None:
        call_driver(self._driver, name, *arguments)

    def seconds(self, calls: Sequence[Call], replays: int = 0) -> float:
        with self._graph(calls) as graph:
            # The first launch uploads the graph.
            self._replay(graph)
            return _median(lambda: self._replay(graph), replays, time.perf_counter)

    def sync(self) -> None:
        self._call("cuCtxSynchronize")

    @contextmanager
    def _graph(self, calls: Sequence[Call]) -> Iterator[ctypes.c_void_p]:
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._capture(calls, graph)
        try:
            flags = ctypes.c_uint64(0)
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, flags)
            yield executable
        finally:
            self._driver.cuGraphDestroy(graph)
            if executable:
                self._driver.cuGraphExecDestroy(executable)

    def _capture(self, calls: Sequence[Call], graph: ctypes.c_void_p) -> None:
        import tvm_ffi

        self.sync()
        with tvm_ffi.use_raw_stream(self._device, self._stream.value):
            self._call("cuStreamBeginCapture_v2", self._stream, _RELAXED)
            try:
                for call in calls:
                    call()
            except BaseException:
                # A capture that is not ended would fail every later one.
                self._driver.cuStreamEndCapture(self._stream, ctypes.byref(graph))
                raise
            self._call("cuStreamEndCapture", self._stream, ctypes.byref(graph))

    def _replay(self, graph: ctypes.c_void_p) -> float:
        start, end = self._events
        self._call("cuEventRecord", start, self._stream)
        self._call("cuGraphLaunch", graph, self._stream)
        self._call("cuEventRecord", end, self._stream)
        self._call("cuEventSynchronize", end)
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value / 1000


def _median(once: Callable[[], float], replays: int, clock: Callable[[], float]) -> float:
    samples: list[float] = []
    start = clock()
    while len(samples) < (replays or MOST_REPLAYS):
        samples.append(once())
        long = len(samples) >= LEAST_REPLAYS and clock() - start > SECONDS
        if not replays and long:
            break
    return float(np.median(samples))


def make_timer(kind: str, device: Any) -> Timer:
    """The timer of a target kind ("cuda" or "llvm"); `device` is TVM's."""
    return CudaTimer(device) if kind == "cuda" else HostTimer()
