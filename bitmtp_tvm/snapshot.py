"""Copies of device buffers that are enqueued behind the work that fills them, and read later.

Single words may be put into a buffer in the same way.
"""

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from bitmtp_tvm.device import call_driver


class Snapshots(Protocol):
    """First in, first out."""

    depth: int
    """Snapshots that may be taken and not read."""

    def take(self) -> None:
        """Enqueue a copy of the buffers as everything enqueued so far leaves them."""

    def put(self, buffer: int, words: Iterable[tuple[int, int]]) -> None:
        """Set words (place and int32) of a buffer, by its place, behind everything enqueued."""

    def read(self) -> tuple[np.ndarray, ...]:
        """The oldest copy that was not read, in the order of the buffers; waits for it."""

    def clear(self) -> None:
        """Forget all that was not read."""


class HostSnapshots:
    """Of buffers in the processor's memory, where nothing is ever under way."""

    depth = 1

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors
        self._taken: deque[tuple[np.ndarray, ...]] = deque()

    def take(self) -> None:
        self._taken.append(tuple(tensor.numpy() for tensor in self._tensors))

    def put(self, buffer: int, words: Iterable[tuple[int, int]]) -> None:
        values = self._tensors[buffer].numpy()
        for place, value in words:
            values[place] = value
        self._tensors[buffer].copyfrom(values)

    def read(self) -> tuple[np.ndarray, ...]:
        return self._taken.popleft()

    def clear(self) -> None:
        self._taken.clear()


class DeviceSnapshots:
    """Of buffers on the GPU, into pinned memory, so that copying holds nobody up.

    TVM's own copies wait for the device. These go straight to the driver, in the stream that TVM
    launches in (the default one), with an event behind each.
    """

    depth = 2

    def __init__(self, tensors: Sequence[Any]) -> None:
        """`tensors`: contiguous int32 tensors, whose memory stays where it is."""
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._tensors = tensors
        self._free = deque(self._slot() for _ in range(self.depth))
        self._taken: deque[tuple[ctypes.c_void_p, list[np.ndarray]]] = deque()

    def _slot(self) -> tuple[ctypes.c_void_p, list[np.ndarray]]:
        """An event, and a pinned array for each tensor. They live as long as the process."""
        event = ctypes.c_void_p()
        call_driver(self._driver, "cuEventCreate", ctypes.byref(event), 0)
        return event, [self._pinned(tuple(map(int, t.shape))) for t in self._tensors]

    def _pinned(self, shape: tuple[int, ...]) -> np.ndarray:
        memory, size = ctypes.c_void_p(), int(np.prod(shape))
        size_t = ctypes.c_size_t(size * 4)
        call_driver(self._driver, "cuMemHostAlloc", ctypes.byref(memory), size_t, 0)
        array = (ctypes.c_int32 * size).from_address(memory.value or 0)
        return np.ctypeslib.as_array(array).reshape(shape)

    def take(self) -> None:
        slot = event, arrays = self._free.popleft()
        for tensor, array in zip(self._tensors, arrays, strict=True):
            source = ctypes.c_uint64(tensor.data_ptr())
            target, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
            call_driver(self._driver, "cuMemcpyDtoHAsync_v2", target, source, size, None)
        call_driver(self._driver, "cuEventRecord", event, None)
        self._taken.append(slot)

    def put(self, buffer: int, words: Iterable[tuple[int, int]]) -> None:
        first = self._tensors[buffer].data_ptr()
        for place, value in words:
            target, bits = ctypes.c_uint64(first + 4 * place), ctypes.c_uint32(value & 0xFFFFFFFF)
            one = ctypes.c_size_t(1)
            call_driver(self._driver, "cuMemsetD32Async", target, bits, one, None)

    def read(self) -> tuple[np.ndarray, ...]:
        slot = event, arrays = self._taken.popleft()
        try:
            call_driver(self._driver, "cuEventSynchronize", event)
            return tuple(array.copy() for array in arrays)
        finally:
            # An interrupt while waiting must not cost the slot.
            self._free.append(slot)

    def clear(self) -> None:
        while self._taken:
            self.read()
