"""`bench --steps --peer transformers`: Transformers' model of the same shape, on the same device.

It is the dense bfloat16 model that Transformers has for the architecture, with random weights and a
static cache: every linear reads 16 bits a weight, and nothing quantises activations. Its layers run
under torch.compile (one program serves them all), and the whole forward as one CUDA graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.step_times import Timing, shown_times

if TYPE_CHECKING:
    from bitmtp_tvm.peer_model import CachedForward, Pieces

MOST_ROWS = 8
"""A wider step is no decoding that Transformers knows."""

WARM_UP, REPLAYS = 50, 100


@dataclass(frozen=True)
class PeerTimes:
    """What was measured: the model's class, versions, tokens that the cache has room for, and the
    times of a forward by rows."""

    model: str
    versions: dict[str, str]
    room: int
    times: dict[int, Timing]


def check_peer(graphs: bool) -> None:
    """Refuse before the work what could not be measured behind it.

    `graphs`: whether our steps run as CUDA graphs. Raises `UsageError` where they do not,
    `BitMTPError` without PyTorch, CUDA or Transformers.
    """
    if not graphs:
        raise UsageError(
            "--peer runs as a CUDA graph, and so must the model beside it: give one compiled for "
            "an NVIDIA GPU, and no --no-graph"
        )
    try:
        torch = import_module("torch")
        import_module("transformers")
    except ImportError as fault:
        raise BitMTPError(
            f"--peer transformers needs PyTorch with CUDA and transformers ({fault}): pip install "
            "'bitmtp-tvm[peer]'"
        ) from fault
    if not torch.cuda.is_available():
        raise BitMTPError(
            f"--peer transformers needs PyTorch with CUDA, and PyTorch {torch.__version__} finds "
            "no GPU here: install a build for this driver"
        )


def peer_widths(widths: Sequence[int]) -> tuple[int, ...]:
    """The fewest and the most rows up to MOST_ROWS that a model has a bucket for."""
    few = [width for width in widths if width <= MOST_ROWS] or [min(widths)]
    return tuple(dict.fromkeys((min(few), max(few))))


def measure_peer(config: Mapping[str, Any], widths: Sequence[int], fill: int) -> PeerTimes:
    """Time a forward of each width on the GPU, its first row behind `fill` - 1 tokens as in our
    steps, with the logits and the argmax of every row.

    `config`: of the manifest. Raises `BitMTPError` for what PyTorch cannot compile or has no memory
    for.
    """
    # Here and not above: they are only needed, and often only there, for a peer.
    import torch
    import transformers

    from bitmtp_tvm.peer_model import CachedForward, build_model, compiled_pieces

    try:
        with torch.no_grad():
            model = build_model(config, "cuda", torch.bfloat16)
            forward = CachedForward(model, fill - 1 + max(widths))
            forward.prefill(fill - 1)
            # A break of the graph would be a loss of the peer's that nobody sees.
            pieces = compiled_pieces(fullgraph=True)
            times = {width: _measure(forward, width, fill - 1, pieces) for width in widths}
    # What PyTorch raises of its compilers, of CUDA and of memory are kinds of it.
    except RuntimeError as fault:
        first = str(fault).strip().partition("\n")[0]
        raise BitMTPError(f"Transformers' model could not be measured: {first}") from fault
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return PeerTimes(type(model).__name__, versions, forward.room, times)


def _measure(forward: "CachedForward", width: int, start: int, pieces: "Pieces") -> Timing:
    rows = forward.rows(width, start)
    graph, _ = captured(lambda: forward(*rows, pieces))
    return Timing.of(replays(graph))


def captured(run: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of what `run` launches, and what it returned: tensors that replays write."""
    cuda = import_module("torch").cuda
    # Compiles, and lets libraries take their memory, which a capture forbids.
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(2):
            run()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        results = run()
    return graph, results


def replays(graph: Any) -> list[float]:
    """Milliseconds of each of REPLAYS, back to back, from one CUDA event to the next."""
    cuda = import_module("torch").cuda
    for _ in range(WARM_UP):
        graph.replay()
    marks = [cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def peer_lines(peer: PeerTimes, ours: Mapping[int, Timing]) -> list[str]:
    """What is printed for people: a line a width, beside our own step of that width."""
    versions = peer.versions
    found = [
        f"in the same run, Transformers {versions['transformers']} on PyTorch {versions['torch']}: "
        f"{peer.model}",
        "  dense bfloat16 weights, activations not quantised, layers under torch.compile, one CUDA "
        f"graph, static cache of {peer.room} tokens",
        f"rows  {'a forward':<32}{'of our step':>13}",
    ]
    for width, time in peer.times.items():
        found.append(f"{width:>4}  {time!s:<32}{f'{time.median / ours[width].median:.2f} x':>13}")
    return found


def shown_peer(peer: PeerTimes, ours: Mapping[int, Timing]) -> dict[str, Any]:
    """For JSON."""
    return {
        "name": "transformers",
        "model": peer.model,
        "weights": "dense bfloat16, activations not quantised",
        "versions": peer.versions,
        "cache_tokens": peer.room,
        "milliseconds": shown_times(peer.times),
        "times_ours": {
            str(width): round(time.median / ours[width].median, 3)
            for width, time in peer.times.items()
        },
    }
