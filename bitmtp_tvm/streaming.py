"""The ceiling of a card: how fast it reads more memory than its caches hold, measured.

The kernel is PTX that the driver compiles, since a machine that measures may have no compiler. On a
processor it is a sum over an array.
"""

import ctypes
from typing import Any

import numpy as np

from bitmtp_tvm.device import call_driver
from bitmtp_tvm.timing import HostTimer, Timer

THREADS = 512
BLOCKS_PER_MULTIPROCESSOR = 4
LOADS = 4
LEAST_BYTES = 256 << 20
HOST_BYTES = 64 << 20
REPLAYS = 15
_MULTIPROCESSORS = 16

# Every thread ORs what it reads, LOADS times 16 bytes a turn; the buffer is zero, so nothing is
# ever written, but the compiler does not know.
_PTX = """\
.version 7.0
.target sm_80
.address_size 64
.visible .entry read_all(.param .u64 data, .param .u64 turns, .param .u64 out)
{
  .reg .pred %more, %any;
  .reg .b32 %grid, %block, %threads, %thread, %word<16>, %found;
  .reg .b64 %at, %left, %out, %first, %step;
  ld.param.u64 %at, [data];
  ld.param.u64 %left, [turns];
  ld.param.u64 %out, [out];
  cvta.to.global.u64 %at, %at;
  cvta.to.global.u64 %out, %out;
  mov.u32 %grid, %nctaid.x;
  mov.u32 %block, %ctaid.x;
  mov.u32 %threads, %ntid.x;
  mov.u32 %thread, %tid.x;
  mad.lo.u32 %thread, %block, %threads, %thread;
  mul.wide.u32 %first, %thread, 16;
  add.u64 %at, %at, %first;
  mul.lo.u32 %grid, %grid, %threads;
  mul.wide.u32 %step, %grid, 16;
  mov.u32 %found, 0;
turn:
LOADING
ORING
  sub.u64 %left, %left, 1;
  setp.ne.u64 %more, %left, 0;
  @%more bra turn;
  setp.ne.u32 %any, %found, 0;
  @%any st.global.u32 [%out], %found;
  ret;
}
"""


def ptx() -> str:
    """The text of `read_all(data, turns, out)`: each thread reads LOADS vectors a turn."""
    loading, oring = [], []
    for i in range(LOADS):
        words = [f"%word{4 * i + j}" for j in range(4)]
        loading += [
            f"  ld.global.v4.u32 {{{', '.join(words)}}}, [%at];",
            "  add.u64 %at, %at, %step;",
        ]
        oring += [f"  or.b32 %found, %found, {word};" for word in words]
    return _PTX.replace("LOADING", "\n".join(loading)).replace("ORING", "\n".join(oring))


def read_bandwidth(kind: str, device: Any, timer: Timer, l2_bytes: int = 0) -> float:
    """10^9 bytes a second that one kernel reads, of a buffer several times the size of the L2.

    `device` is TVM's; raises `BitMTPError` where the driver refuses.
    """
    import tvm

    if kind != "cuda":
        array = np.zeros(HOST_BYTES // 8)
        return HOST_BYTES / HostTimer().seconds([array.sum], REPLAYS) / 1e9
    driver = ctypes.CDLL("libcuda.so.1")
    grid = BLOCKS_PER_MULTIPROCESSOR * _multiprocessors(driver)
    turn = grid * THREADS * LOADS * 16
    turns = -(-max(LEAST_BYTES, 6 * l2_bytes) // turn)
    data = tvm.runtime.empty((turns * turn,), "uint8", device)
    call_driver(driver, "cuMemsetD8_v2", *_pointer(data), ctypes.c_ubyte(0), _size(turns * turn))
    out = tvm.runtime.empty((1,), "uint32", device)
    function = _load(driver)
    values = (*_pointer(data), ctypes.c_uint64(turns), *_pointer(out))
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))

    def launch() -> None:
        import tvm_ffi

        stream = ctypes.c_void_p(tvm_ffi.get_raw_stream(device))
        sizes = (grid, 1, 1, THREADS, 1, 1, 0)
        call_driver(driver, "cuLaunchKernel", function, *sizes, stream, pointers, None)

    launch()
    return turns * turn / timer.seconds([launch], REPLAYS) / 1e9


def _pointer(tensor: Any) -> tuple[ctypes.c_uint64]:
    return (ctypes.c_uint64(tensor.data_ptr()),)


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


def _multiprocessors(driver: ctypes.CDLL) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    call_driver(driver, "cuCtxGetDevice", ctypes.byref(device))
    call_driver(driver, "cuDeviceGetAttribute", ctypes.byref(value), _MULTIPROCESSORS, device)
    return value.value


def _load(driver: ctypes.CDLL) -> ctypes.c_void_p:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call_driver(driver, "cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx().encode()))
    call_driver(driver, "cuModuleGetFunction", ctypes.byref(function), module, b"read_all")
    return function
