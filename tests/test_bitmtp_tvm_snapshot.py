"""Copies and single words in the order in which they were enqueued."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from bitmtp_tvm.snapshot import DeviceSnapshots, HostSnapshots


class Driver:
    """A libcuda whose stream stands still until somebody waits for an event in it.

    Device memory is the processor's; events are numbered.
    """

    def __init__(self):
        self.events, self.pinned, self.stream = 0, [], []

    def cuEventCreate(self, event, flags):
        self.events += 1
        event._obj.value = self.events
        return 0

    def cuMemHostAlloc(self, memory, size, flags):
        self.pinned.append(ctypes.create_string_buffer(size.value))
        memory._obj.value = ctypes.addressof(self.pinned[-1])
        return 0

    def cuMemcpyDtoHAsync_v2(self, target, source, size, stream):
        return self.enqueue(lambda: ctypes.memmove(target.value, source.value, size.value))

    def cuMemsetD32Async(self, target, bits, count, stream):
        assert isinstance(bits, ctypes.c_uint32) and count.value == 1
        return self.enqueue(lambda: ctypes.memmove(target.value, ctypes.byref(bits), 4))

    def cuEventRecord(self, event, stream):
        return self.enqueue(event.value)

    def enqueue(self, work):
        self.stream.append(work)
        return 0

    def cuEventSynchronize(self, event):
        while (work := self.stream.pop(0)) != event.value:
            work()
        return 0


class Tensor:
    """A tensor of TVM's, as far as snapshots know it."""

    def __init__(self, values):
        self.values = np.array(values, np.int32)
        self.shape = self.values.shape

    def data_ptr(self):
        return self.values.ctypes.data

    def numpy(self):
        return self.values.copy()

    def copyfrom(self, values):
        self.values[:] = values


@pytest.fixture(params=[HostSnapshots, DeviceSnapshots])
def snapshots(request, monkeypatch):
    """Of two buffers."""
    loader = SimpleNamespace(**vars(ctypes) | {"CDLL": lambda name: Driver()})
    monkeypatch.setattr("bitmtp_tvm.snapshot.ctypes", loader)
    return request.param([Tensor([1, 2, 3, 4]), Tensor([5, 6])])


def test_words_change_behind_the_copies_that_were_enqueued_before_them(snapshots):
    snapshots.take()
    snapshots.put(0, [(2, -7), (0, 2**31 - 1)])
    snapshots.put(1, [(1, -(2**31))])
    found = [snapshots.read()] if snapshots.depth == 1 else []
    snapshots.take()
    found += [snapshots.read() for _ in range(2 - len(found))]
    states, rings = zip(*found, strict=True)
    assert [state.tolist() for state in states] == [[1, 2, 3, 4], [2**31 - 1, 2, -7, 4]]
    assert [ring.tolist() for ring in rings] == [[5, 6], [5, -(2**31)]]
