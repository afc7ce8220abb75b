"""The compiled model on its device: parameters, KV storage and the functions of every bucket.

It knows tensors and slots; tokens mean nothing to it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bitmtp_tvm.artifact import Artifact, load_library, read_parameters
from bitmtp_tvm.device import read_device, read_host
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.manifest import Manifest
from bitmtp_tvm.snapshot import DeviceSnapshots, HostSnapshots, Snapshots
from bitmtp_tvm.threads import use_cores
from relax_models.state import RING, RING_ROWS, STATE_WORDS, Word

# Called with the phase in words, the bytes done and the total.
Progress = Callable[[str, int, int], None]

# Called with a kernel's name, the kernel, and its arguments with the names of those that last.
Seen = Callable[[str, Any, list[tuple[Any, str]]], None]

INPUTS = ("tokens", "position", "boundary", "visible", "logit_rows", "horizon")
CACHE = "_kv_cache"
VISIBLE_WORDS = 2


@dataclass(frozen=True)
class Step:
    """One bucket of one entry function, bound to device buffers that keep their addresses.

    `inputs` are written before `run()`; what it returns stays valid until the next run of any step.
    """

    width: int
    inputs: dict[str, Any]
    run: Callable[[], Any]

    def set(self, **arrays: np.ndarray) -> None:
        for name, array in arrays.items():
            self.inputs[name].copyfrom(array)


class Session:
    """A loaded artifact. The caller keeps slots below `context` and tokens below `vocab_size`."""

    def __init__(
        self, artifact: Artifact, progress: Progress | None = None, graph: bool = True
    ) -> None:
        """Load library and parameters and allocate the KV storage, once and for all buckets.

        `artifact` comes from `open_artifact` and has passed `check_device`. With `graph`, steps on
        a GPU run as CUDA graphs, each captured when its bucket first runs; without, the same
        kernels are launched one by one.
        """
        manifest = artifact.manifest
        self.context = manifest.context
        self.vocab_size = int(manifest.config["vocab_size"])
        self.widths = manifest.widths
        self.chunks = manifest.chunks
        self._free_before = _free_memory(manifest)
        self._manifest = manifest
        library = load_library(artifact)
        import tvm
        from tvm.runtime.vm import VirtualMachine

        self._tvm = tvm
        if manifest.kind == "llvm":
            use_cores()
        self._device = tvm.cuda(0) if manifest.kind == "cuda" else tvm.cpu(0)
        self.device = manifest.arch or "cpu"
        # Not by way of `self`, which then would be freed only when Python looks for cycles.
        self._new_machine = partial(VirtualMachine, library, self._device)
        self._machine = self._new_machine()
        self._parameters = dict(self._load(artifact, progress))
        self._parameters.update(self._storage())
        chunks = sorted({*manifest.widths, *manifest.prefill})
        self._loop = dict(self._loop_buffers())
        buffers = [self._loop["state"], self._loop["ring"]]
        on_gpu = manifest.kind == "cuda"
        self._snapshots: Snapshots = (DeviceSnapshots if on_gpu else HostSnapshots)(buffers)
        self.depth = self._snapshots.depth
        self.graph = graph and on_gpu
        self._steps = {width: self._bind_steps(width) for width in manifest.widths}
        self._decode = {width: self._bind("decode", width) for width in manifest.widths}
        self._prefill = {width: self._bind("prefill", width) for width in chunks}
        self._logits: Any = None
        self._asked = 0

    def _load(self, artifact: Artifact, progress: Progress | None) -> Iterator[tuple[str, Any]]:
        total, done = sum(shard.bytes for shard in artifact.manifest.shards), 0
        for name, array in read_parameters(artifact.directory, artifact.manifest.shards):
            yield name.replace(".", "_"), self._tvm.runtime.tensor(array, self._device)
            done += array.nbytes
            if progress:
                progress("loading parameters", done, total)

    def _storage(self) -> Iterator[tuple[str, Any]]:
        """The KV storage, zeroed: kernels may read slots that nothing has written yet."""
        layout = self._manifest.kv
        zeros = np.zeros(layout.shape, layout.dtype)
        for layer in range(self._manifest.config["num_hidden_layers"]):
            yield f"layers_{layer}{CACHE}", self._tvm.runtime.tensor(zeros, self._device)

    def _loop_buffers(self) -> Iterator[tuple[str, Any]]:
        """State, ring and `seen` of the decode loop: see relax_models/state.py."""
        shapes = {"state": (STATE_WORDS,), "ring": (RING_ROWS, RING), "seen": (self.vocab_size,)}
        for name, shape in shapes.items():
            yield name, self._tvm.runtime.tensor(np.zeros(shape, np.int32), self._device)

    def _inputs(self, width: int) -> dict[str, Any]:
        """Buffers for the rows of a step."""
        shapes = {"boundary": (1,), "visible": (width, VISIBLE_WORDS)}
        dtypes = {"visible": "uint32"}
        return {
            name: self._tvm.runtime.empty(
                shapes.get(name, (width,)), dtypes.get(name, "int32"), self._device
            )
            for name in INPUTS
        }

    def _bind_steps(self, width: int) -> dict[int, Callable[[], Any]]:
        """For every chunk size, what runs so many steps of a bucket."""
        rows = self._inputs(width)
        if self._manifest.kind == "cuda" and not self.graph:
            step = self._bound(f"step_w{width}", rows)
            return {count: _repeated(step, count) for count in self.chunks}
        entry = f"{'graph' if self.graph else 'step'}_w{width}"
        return {count: self._bound(f"{entry}_x{count}", rows) for count in self.chunks}

    def _bind(self, entry: str, width: int) -> Step:
        inputs = self._inputs(width)
        return Step(width, inputs, self._bound(f"{entry}_w{width}", inputs))

    def _bound(self, name: str, inputs: dict[str, Any], machine: Any = None) -> Callable[[], Any]:
        """The function `name` with all its arguments; they keep their addresses from here on."""
        machine = machine or self._machine
        arguments = []
        for parameter in self._parameter_names(name):
            found = [group.get(parameter) for group in (inputs, self._loop, self._parameters)]
            argument = next((tensor for tensor in found if tensor is not None), None)
            if argument is None:
                raise BitMTPError(f"{name} needs {parameter}, which the artifact does not hold")
            arguments.append(argument)
        machine.save_function(name, f"bound_{name}", *arguments)
        bound: Callable[[], Any] = machine[f"bound_{name}"]
        return bound

    def _parameter_names(self, function: str) -> list[str]:
        module = self._machine.module
        arity = int(module["get_function_arity"](function))
        return [
            str(module["get_function_param_name"](function, i)).replace(".", "_")
            for i in range(arity)
        ]

    def write(self, state: np.ndarray, seen: np.ndarray | None = None) -> None:
        """Set the loop's state `(STATE_WORDS,)` int32, and `seen` `(V,)` int32 where given.

        What was enqueued is waited for, and its snapshots are forgotten.
        """
        self._snapshots.clear()
        self._loop["state"].copyfrom(state)
        if seen is not None:
            self._loop["seen"].copyfrom(seen)

    def adjust(self, words: Mapping[Word, int]) -> None:
        """Set single words of the state behind everything enqueued so far.

        The other words stay as the steps leave them.
        """
        # The state is the first buffer of the snapshots.
        self._snapshots.put(0, words.items())

    def run(self, width: int, steps: int) -> None:
        """Enqueue `steps` (one of `chunks`) steps in the bucket `width`, and a snapshot behind.

        At most `depth` snapshots may wait to be read.
        """
        self._steps[width][steps]()
        self._snapshots.take()

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """State `(STATE_WORDS,)`, ring `(3, RING)` int32 of the oldest snapshot; waits for it."""
        state, ring = self._snapshots.read()
        return state, ring

    def prefill(self, tokens: Sequence[int], start: int) -> None:
        """Write the causal K/V of `tokens` to the slots from `start` on, chunk by chunk.

        Slots behind the last token, up to a chunk's width, are scratch afterwards.
        """
        self._check_slots(start, len(tokens))
        done = 0
        while done < len(tokens):
            step = self._prefill[chunk_width(len(tokens) - done, tuple(self._prefill))]
            rows = min(step.width, len(tokens) - done)
            first = start + done
            step.set(
                tokens=_padded(tokens[done : done + rows], step.width, 0),
                position=_padded(range(first, first + rows), step.width, 0),
                boundary=np.array([first], np.int32),
            )
            step.run()
            done += rows
        # Callers time this: let the device finish.
        self._device.sync()

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        boundary: int,
        visible: np.ndarray | None,
        logit_rows: Sequence[int],
    ) -> np.ndarray:
        """Run rows at the slots `boundary`, `boundary + 1`, … in the smallest bucket that fits.

        `visible`: bool `(rows, rows)`, which rows of this step a row sees (itself always), None for
        plainly causal. Returns the greedy token of each of `logit_rows`, int32; -1 where its logits
        are not finite.
        """
        rows = len(tokens)
        if not 0 < rows <= self.widths[-1] or len(logit_rows) > rows:
            raise ValueError(f"{rows} rows, of which {len(logit_rows)} ask; at most {self.widths}")
        # Rows may reach behind the context: of several that stand at one position, one survives.
        self._check_slots(boundary, 1)
        if not 0 <= min(positions) <= max(positions) < self.context:
            raise ValueError(f"positions {list(positions)} of a context of {self.context}")
        step = self._decode[min(width for width in self.widths if width >= rows)]
        step.set(
            tokens=_padded(tokens, step.width, 0),
            position=_padded(positions, step.width, 0),
            boundary=np.array([boundary], np.int32),
            visible=_visible_words(visible, rows, step.width),
            logit_rows=_padded(logit_rows, step.width, -1),
        )
        self._logits, chosen = step.run()
        self._asked = len(logit_rows)
        return chosen.numpy()[: self._asked]

    def logits(self) -> np.ndarray:
        """Logits of the last `decode`, float32 `(asked, vocab_size)` in its logit_rows' order."""
        if self._logits is None:
            raise ValueError("no decode step has run")
        return self._logits.numpy()[: self._asked]

    def kv(self, layer: int) -> np.ndarray:
        """A copy of one layer's cache, float16 `(2, kv_heads, slots, head_dim)`: keys, values."""
        return self._parameters[f"layers_{layer}{CACHE}"].numpy()

    def memory_used(self) -> int:
        """Bytes of the device's memory that went away since this session began to load."""
        self._device.sync()
        return self._free_before - _free_memory(self._manifest)

    def observe(self, entry: str, width: int, start: int, seen: Seen) -> None:
        """Run "step" or "prefill" of `width` rows once, kernel by kernel, and tell `seen` of each
        kernel just before it runs: its name, the function, its arguments, and for each the name
        under which it outlives the step, or "". A chunk of prefill stands at the slots from `start`
        on; where a step does, the state says."""
        inputs = self._prefill[width].inputs if entry == "prefill" else self._inputs(width)
        if entry == "prefill":
            position = np.minimum(np.arange(start, start + width), self.context - 1)
            inputs["tokens"].copyfrom(np.zeros(width, np.int32))
            inputs["position"].copyfrom(position.astype(np.int32))
            inputs["boundary"].copyfrom(np.array([start], np.int32))
        lasting = {tensor.data_ptr(): name for name, tensor in self._parameters.items()}
        kernels = {kernel.name for kernel in self._manifest.kernels}

        def instrument(func: Any, name: str, before: bool, result: Any, *arguments: Any) -> int:
            if before and name in kernels:
                seen(name, func, [(a, lasting.get(a.data_ptr(), "")) for a in arguments])
            return 0

        # Of its own: a machine that was observed cannot be made to forget its observer.
        machine = self._new_machine()
        machine.set_instrument(instrument)
        self._bound(f"{entry}_w{width}", inputs, machine)()
        self._device.sync()

    @property
    def manifest(self) -> Manifest:
        """The artifact's."""
        return self._manifest

    @property
    def device_handle(self) -> Any:
        """TVM's name of the device."""
        return self._device

    def copy_of(self, tensor: Any) -> Any:
        """Another tensor on the device with the same contents."""
        return tensor.copyto(self._tvm.runtime.empty(tensor.shape, str(tensor.dtype), self._device))

    def _check_slots(self, start: int, rows: int) -> None:
        if start < 0 or start + rows > self.context:
            raise ValueError(f"slots {start}..{start + rows} of a context of {self.context}")


def _repeated(step: Callable[[], Any], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            step()

    return run


def chunk_width(remaining: int, widths: Sequence[int]) -> int:
    """Bucket for the next prefill chunk: one that holds all, if more than half of it is used, else
    the largest full one, else the smallest."""
    for width in widths:
        if width >= remaining:
            if 2 * remaining > width:
                return width
            break
    return max((width for width in widths if width <= remaining), default=widths[0])


def _padded(values: Sequence[int], width: int, filler: int) -> np.ndarray:
    row = np.full(width, filler, np.int32)
    row[: len(values)] = values
    return row


def _visible_words(visible: np.ndarray | None, rows: int, width: int) -> np.ndarray:
    """Bit j % 32 of word j / 32: uint32 `(width, 2)`. Padding rows see themselves alone."""
    square = np.eye(width, 32 * VISIBLE_WORDS, dtype=bool)
    square[:rows, :rows] = np.tri(rows, dtype=bool) if visible is None else visible
    bits = square.reshape(width, VISIBLE_WORDS, 32).astype(np.uint64)
    return (bits << np.arange(32, dtype=np.uint64)).sum(axis=-1).astype(np.uint32)


def _free_memory(manifest: Manifest) -> int:
    return (read_device() if manifest.kind == "cuda" else read_host()).free
