"""What MetaSchedule's worker processes do: build a schedule, run it, compare it, time it.

Every function is sent to a worker by name. Results are compared with those of the rule's schedule,
which is run first and leaves a digest of its own in a file: one that differs in a bit is an error,
not a time.
"""

import hashlib
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.threads import use_cores

REPEATS = 20
PROCESSOR, RPC_SESSION = 1, 128
FILL = 512
"""Slots of context that attention is timed over, where there are so many."""


def build_schedule(mod: Any, target: Any, params: Any) -> Any:
    """A scheduled one-function module, compiled for its target."""
    if target.kind.name == "cuda":
        from bitmtp_tvm.toolchain import prepare_cuda, register_nvrtc

        prepare_cuda()
        register_nvrtc()
    import tvm

    with target:
        return tvm.tirx.build(mod, target=target)


def export_library(triple: str, built: Any) -> str:
    """Link a compiled module for the host `triple`, which may be another machine's."""
    from bitmtp_tvm.toolchain import cross_compiler

    path = Path(tempfile.mkdtemp(prefix="bitmtp-schedule-")) / "schedule.so"
    built.export_library(str(path), fcompile=cross_compiler(triple))
    return str(path)


def make_arguments(device: Any, infos: Any, repeats: int) -> list[list[Any]]:
    """Tensors for a kernel: floats around zero, random codes, and integers that are safe indices.

    `infos` are (kind, dtype, shape); a lone int32 is the boundary of a KV cache (4 dimensions).
    """
    import tvm

    random = np.random.default_rng(7)
    slots = next((shape[2] for _, _, shape in infos if len(shape) == 4), 0)
    boundary = min(FILL, max(slots - 256, 0))
    arrays = [_array(random, dtype, tuple(shape), boundary) for _, dtype, shape in infos]
    return [
        [tvm.runtime.tensor(array.copy(), device=device) for array in arrays]
        for _ in range(repeats)
    ]


def _array(random: Any, dtype: str, shape: tuple[int, ...], boundary: int) -> np.ndarray:
    if dtype.startswith("float"):
        return np.asarray(random.normal(size=shape)).astype(dtype)
    if dtype == "int32":
        return np.full(shape, boundary if shape == (1,) else 0, np.int32)
    if dtype == "uint32":
        # Masks: every row sees every slot.
        return np.full(shape, 0xFFFFFFFF, np.uint32)
    if dtype == "uint16":
        # bfloat16 bits: magnitudes of 1 and less.
        return random.integers(0x3C00, 0x3F80, shape).astype(np.uint16)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype)


def run_checked(
    reference: str,
    results: tuple[int, ...],
    built: Any,
    device: Any,
    config: Any,
    arguments: Any,
) -> list[float]:
    """Seconds of one run; ValueError where the buffers `results` are not those of the
    reference.

    The file `reference` is written by the first run, and belongs to one operation.
    """
    (tensors,) = arguments
    if device.dlpack_device_type() == PROCESSOR:
        # Of this machine, and so as in a session; a board behind RPC has its own server.
        use_cores()
    built["main"](*tensors)
    device.sync()
    digest = hashlib.sha256()
    for index in results:
        digest.update(tensors[index].numpy().tobytes())
    path = Path(reference)
    if not path.exists():
        path.write_text(digest.hexdigest())
    elif path.read_text() != digest.hexdigest():
        raise ValueError("the results are not those of the rule's schedule")
    return [_seconds(built, device, tensors)]


def _seconds(built: Any, device: Any, tensors: Any) -> float:
    """The lower quartile; on a processor behind a flush of its caches, since in a decode step the
    weights come from memory."""
    # Behind RPC the number of the session stands in the higher bits.
    on_processor = device.dlpack_device_type() % RPC_SESSION == PROCESSOR
    evaluator = built.time_evaluator(
        "main",
        device,
        number=1,
        repeat=REPEATS,
        min_repeat_ms=0 if on_processor else 5,
        f_preproc="cache_flush_cpu_non_first_arg" if on_processor else "",
    )
    return float(statistics.quantiles(evaluator(*tensors).results)[0])


def make_remote_arguments(session: Any, device: Any, infos: Any, repeats: int) -> list[list[Any]]:
    """`make_arguments` on a device behind an RPC session."""
    return make_arguments(device, infos, repeats)


def run_remote(
    reference: str,
    results: tuple[int, ...],
    session: Any,
    built: Any,
    device: Any,
    config: Any,
    arguments: Any,
) -> list[float]:
    """`run_checked` on a device behind an RPC session."""
    return run_checked(reference, results, built, device, config, arguments)
