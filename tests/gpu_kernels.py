"""The GPU kernels of the tests: which there are, how they are built, how they run on numpy arrays.

    python tests/gpu_kernels.py build DIR [--arch sm_90a] [--ptx]

builds all of them into DIR/kernels.so; `pytest -m gpu --kernels DIR` runs them on a machine that
has TVM's runtime alone. So nothing at the top of this file needs the compiler.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bitmtp_tvm.targets import TARGETS, X86_64, Target

EPS = 1e-5
FORMAT = "bitnet-ternary"
LIBRARY = "kernels.so"

# Segments, K, residual; the shapes of the demo and of BitNet-2B, and ragged ones.
LINEARS = [
    ((640, 128, 128), 640, False),
    ((640,), 1792, True),
    ((2560, 640, 640), 2560, False),
    ((2560,), 6912, True),
    ((100, 30, 7), 200, True),
    ((8704,), 640, False),
]
LINEAR_WIDTHS = (1, 3, 4, 8, 16, 32, 64, 130)
# Of shapes above: width, template, and tiles that no rule chooses there.
LINEAR_TILES = [
    (2, 1, "low_bit_mma_few", (10, 1, 1, 1, 2, 2, 4, 2)),
    (2, 1, "low_bit_mma_few", (5, 2, 2, 1, 4, 8, 1, 1)),
    (2, 1, "low_bit_gemv", (1, 2, 7, 3)),
    (2, 3, "low_bit_gemv", (2, 1, 20, 1)),
    (2, 8, "low_bit_mma", (7, 2, 1, 1, 1, 4, 1, 1)),
    (2, 32, "low_bit_mma", (5, 2, 2, 4, 4, 2, 1, 1)),
    (2, 64, "low_bit_mma", (10, 1, 2, 8, 1, 1, 1, 1)),
    (3, 1, "low_bit_mma_few", (18, 1, 1, 1, 3, 6, 4, 1)),
    (3, 16, "low_bit_mma", (9, 1, 1, 2, 6, 2, 1, 2)),
    (3, 130, "low_bit_mma", (4, 2, 4, 3, 2, 1, 1, 1)),
    (4, 1, "low_bit_mma_few", (1, 4, 2, 1, 2, 4, 4, 3)),
    (4, 130, "low_bit_mma", (2, 4, 2, 6, 1, 2, 1, 1)),
    (5, 4, "low_bit_mma", (3, 4, 4, 1, 2, 2, 1, 1)),
    (2, 130, "low_bit_mma_wide_some", (4, 2, 2, 8, 3, 1)),
    (3, 130, "low_bit_mma_wide_some", (2, 4, 5, 2, 3, 2)),
    (4, 130, "low_bit_mma_wide_some", (5, 1, 2, 4, 2, 1)),
    (5, 130, "low_bit_mma_wide_some", (2, 2, 4, 4, 4, 3)),
]
NORM_SIZES = (640, 1792, 2560, 6912, 1410, 77)
NORM_WIDTHS = (1, 9)
GROUP = 128
# Format: bits of a code.
GROUP_FORMATS = {"ternary-g128": 2, "binary-g128": 1}
# As LINEARS: the shape of a layer, of a vocabulary, of many small blocks, of many groups.
GROUP_LINEARS = [
    ((512, 128, 128), 512, False),
    ((1003,), 2048, False),
    ((8721,), 640, True),
    ((40, 24), 9728, True),
    ((40,), 12288, False),
]
GROUP_WIDTHS = (1, 2, 3, 8, 64, 130)
# As LINEAR_TILES, of both formats.
GROUP_TILES = [
    (0, 8, "low_bit_group_mma", (1, 1, 1, 4, 2, 4, 2)),
    (1, 3, "low_bit_group_mma", (1, 2, 4, 2, 1, 1, 1)),
    (1, 64, "low_bit_group_mma", (2, 1, 4, 2, 3, 1, 1)),
    (2, 8, "low_bit_group_mma", (1, 1, 2, 4, 3, 2, 1)),
    (2, 1, "low_bit_group_gemv", (1, 2, 2, 1)),
    (2, 130, "low_bit_group_mma", (2, 1, 2, 2, 2, 1, 1)),
    (4, 2, "low_bit_group_gemv", (1, 1, 16, 3)),
    (0, 130, "low_bit_group_mma_wide_some", (2, 2, 1, 1, 4, 4)),
    (2, 130, "low_bit_group_mma_wide", (4, 2, 1, 3, 2, 1)),
    (3, 130, "low_bit_group_mma_wide_some", (2, 4, 1, 2, 3, 1)),
    (4, 130, "low_bit_group_mma_wide_some", (4, 1, 1, 3, 3, 2)),
]
# Of Bonsai-1.7B, in buckets of prefill, one that is no multiple of a tile, and one of a step.
GROUP_PROMPTS = [
    ((2048, 1024, 1024), 2048, False),
    ((2048,), 2048, True),
    ((6144, 6144), 2048, False),
    ((2048,), 6144, True),
]
STEP_ROWS = 8
PROMPT_ROWS = (128, 200, 512)
GROUP_SIZES = (512, 1412, 2560, 9728)
# Format, segments, K, residual, activation, norm: the shapes of layers, and ragged ones.
FUSED_LINEARS = [
    (FORMAT, (2560, 640, 640), 2560, False, "", True),
    (FORMAT, (6912, 6912), 2560, False, "relu2", True),
    (FORMAT, (2560,), 6912, True, "", True),
    (FORMAT, (1792, 1792), 640, False, "relu2", True),
    (FORMAT, (640,), 1792, True, "", True),
    (FORMAT, (100, 30, 7), 200, True, "", True),
    (FORMAT, (64, 64), 1410, False, "silu", True),
    ("ternary-g128", (2048, 1024, 1024), 2048, False, "", True),
    ("ternary-g128", (6144, 6144), 2048, False, "silu", True),
    ("ternary-g128", (2048,), 6144, True, "", False),
    ("binary-g128", (96, 96), 1412, False, "silu", True),
    ("binary-g128", (71,), 9728, True, "", False),
]
FUSED_WIDTHS = (1, 2)
# Heads and their size, of attention that is quantised as it is joined; the last width has blocks of
# several warps.
QUANTIZED_JOINS = [(20, 128), (3, 256)]
QUANTIZED_WIDTHS = (2, 9, 64)
# Vocabulary, size.
HEADS = [(8192, 640), (1001, 2560), (309, 1056), (131, 96), (67, 77)]
HEAD_ROWS = (1, 3, 8, 16, 25, 64)
# As HEADS, of heads with a bound, and whether they know of a repetition penalty.
BOUNDED_HEADS = [(1001, 320, True), (131, 77, False), (4099, 2560, False)]
BOUNDED_ROWS = (1, 3, 8, 16, 25, 40, 64)
VOCABULARIES = (8192, 128256, 1001)
# Heads, key/value heads, head size.
ATTENTIONS = [(10, 2, 64), (20, 5, 128), (6, 2, 80), (7, 1, 36)]
# As relax_models.attention_ops has them: a machine that runs kernels need not have the compiler.
CHAINS, CHAIN_SLOTS = 32, 64
MASKED_WIDTHS = (1, 3, 8, 16, 64)
CAUSAL_WIDTHS = (9, 130)
SLOTS = 700
# Of a cache in which a chain of slots has several turns, and the widths that attend to it.
LONG_ATTENTION, LONG_SLOTS = (4, 2, 64), 4300
LONG_WIDTHS = (1, 8)
POSITIONS = 90
# Heads of attention that turns its queries itself, in the longer cache.
ROPE_ATTENTIONS = [(10, 2, 64), (20, 5, 128), (16, 8, 128)]
ROPE_WIDTHS = (1, 2, 3)


CHOOSE_ROWS = (1, 8, 64)
# Of the decode step: the fake model's vocabulary, and the buckets that its tests run in.
STEP_VOCABULARY = 50
STEP_WIDTHS = (1, 3, 8, 16, 64)


@dataclass(frozen=True)
class Kernel:
    """The operation `op` of `relax_models`, made of `arguments`, at the given dimensions.

    tile: the template's name and the numbers of its tile; without one, the rule's choice.
    """

    op: str
    arguments: tuple
    dims: tuple[tuple[str, int], ...]
    tile: tuple = ()

    @property
    def name(self) -> str:
        text = "_".join(map(str, (self.op, *self.arguments, *sum(self.dims, ()), *self.tile)))
        return "".join(c if c.isalnum() else "_" for c in text)


def kernel(op: str, *arguments: Any, **dims: int) -> Kernel:
    return Kernel(op, arguments, tuple(dims.items()))


def linear(segments: Sequence[int], size: int, residual: bool, width: int) -> Kernel:
    arguments = (tuple(segments), size, "cuda", FORMAT, residual)
    return kernel("low_bit_linear", *arguments, width=width)


def group_linear(
    segments: Sequence[int], size: int, residual: bool, format_name: str, width: int
) -> Kernel:
    arguments = (tuple(segments), size, "cuda", format_name, residual)
    return kernel("low_bit_linear", *arguments, width=width)


def fused_linear(
    form: str,
    segments: Sequence[int],
    size: int,
    residual: bool,
    activation: str,
    norm: bool,
    width: int,
) -> Kernel:
    """A linear that quantises its own input, with a norm or without."""
    op, settings = ("norm_low_bit_linear", (EPS,)) if norm else ("quantize_low_bit_linear", ())
    arguments = (tuple(segments), size, "cuda", form, residual, *settings, activation)
    return kernel(op, *arguments, width=width)


def quantizer(size: int, group: int, norm: bool, width: int) -> Kernel:
    """What quantises in front of a linear, by itself."""
    if norm:
        return kernel("norm_quantize", size, EPS, group, width=width)
    return kernel("quantize", size, group, width=width)


def gated_quantizer(size: int, group: int, activation: str, width: int) -> Kernel:
    """The same over a gate and up: without a norm where there are groups."""
    if group:
        return kernel("gated_quantize", size, group, width=width)
    return kernel("gated_norm_quantize", size, EPS, activation, width=width)


def group_warps(groups: int) -> int:
    """Ways that the sum over so many groups is split."""
    return -(-groups // max(4, -(-groups // 16)))


def attention(heads: int, kv_heads: int, head_dim: int, causal: bool, width: int) -> Kernel:
    return kernel("attention", heads, kv_heads, head_dim, SLOTS, causal, width=width)


def rope_attentions(shape: Sequence[int], slots: int, width: int) -> Iterator[Kernel]:
    """Attention that turns its queries, and what it replaces."""
    sizes = (*shape, POSITIONS, slots)
    yield kernel("rope_kv_write", *sizes, width=width)
    yield kernel("attention_parts", *shape, slots, width=width)
    yield kernel("rope_attention_parts", *sizes, width=width)


def long_attentions(width: int) -> Iterator[Kernel]:
    """Both halves of a step's attention to a long cache, and a prefill chunk's."""
    heads, _, head_dim = LONG_ATTENTION
    yield kernel("attention_parts", *LONG_ATTENTION, LONG_SLOTS, width=width)
    yield kernel("attention_join", heads, head_dim, width=width)
    yield kernel("attention", *LONG_ATTENTION, LONG_SLOTS, True, width=width)


def all_kernels() -> Iterator[Kernel]:
    for (segments, size, residual), width in product(LINEARS, LINEAR_WIDTHS):
        yield linear(segments, size, residual, width)
    yield from tiled_linears()
    for size, width in product(NORM_SIZES, NORM_WIDTHS):
        yield kernel("norm_quantize", size, EPS, width=width)
        yield kernel("gated_norm_quantize", size, EPS, "relu2", width=width)
        yield kernel("gated_norm_quantize", size, EPS, "silu", width=width)
        yield kernel("final_norm", size, EPS, width=width, rows=width)
        yield kernel("embed", 50, size, width=width)
    yield from group_kernels()
    yield from fused_kernels()
    for (vocab, size), rows in product(HEADS, HEAD_ROWS):
        yield kernel("head", vocab, size, rows=rows)
    for (vocab, size, penalty), rows in product(BOUNDED_HEADS, BOUNDED_ROWS):
        yield from bounded_head(vocab, size, penalty, rows)
    for vocab in VOCABULARIES:
        yield kernel("greedy", vocab, rows=8)
    for vocab, rows in product(VOCABULARIES, CHOOSE_ROWS):
        yield kernel("softmax_parts", vocab, rows=rows)
        yield kernel("choose", vocab, rows=rows)
    yield from step_kernels()
    for shape in ATTENTIONS:
        for width in (1, 9, 130):
            yield kernel("rope_kv_write", *shape, POSITIONS, SLOTS, width=width)
        for width in MASKED_WIDTHS:
            yield attention(*shape, False, width)
        # And 8 rows for the equality of a row's bits.
        for width in sorted({*MASKED_WIDTHS, 8}):
            yield kernel("attention_parts", *shape, SLOTS, width=width)
            yield kernel("attention_join", shape[0], shape[2], width=width)
        for width in CAUSAL_WIDTHS:
            yield attention(*shape, True, width)
    for width in LONG_WIDTHS:
        yield from long_attentions(width)
    for shape, width in product(ROPE_ATTENTIONS, ROPE_WIDTHS):
        yield from rope_attentions(shape, LONG_SLOTS, width)


def tiled_linears() -> Iterator[Kernel]:
    for shape, width, template, numbers in LINEAR_TILES:
        yield replace(linear(*LINEARS[shape], width), tile=(template, *numbers))
    for (shape, width, template, numbers), form in product(GROUP_TILES, GROUP_FORMATS):
        yield replace(group_linear(*GROUP_LINEARS[shape], form, width), tile=(template, *numbers))


def tiled_as(item: Kernel) -> list[Kernel]:
    """The kernels that compute what `item` does: that of the rule, and those of other tiles."""
    return [item, *(other for other in tiled_linears() if replace(other, tile=()) == item)]


def bounded_head(vocab: int, size: int, penalty: bool, rows: int) -> Iterator[Kernel]:
    """The three kernels of a bounded head, in their order."""
    yield kernel("final_norm_codes", size, EPS, width=rows, rows=rows)
    yield kernel("head_codes", vocab, size, penalty, rows=rows)
    yield kernel("head_rescore", vocab, size, penalty, rows=rows)


def fused_kernels() -> Iterator[Kernel]:
    """What `bitmtp_tvm/fuse.py` puts in place of several kernels, and all that it replaces."""
    for shape, width in product(FUSED_LINEARS, FUSED_WIDTHS):
        form, segments, size, residual, activation, norm = shape
        group = GROUP if form in GROUP_FORMATS else 0
        yield fused_linear(*shape, width)
        yield quantizer(size, group, norm, width)
        yield group_linear(segments, size, residual, form, width)
        if activation:
            yield gated_quantizer(segments[0], group, activation, width)
            yield quantizer(segments[0], group, not group, width)
    for (heads, head_dim), width in product(QUANTIZED_JOINS, QUANTIZED_WIDTHS):
        yield kernel("attention_join", heads, head_dim, width=width)
        yield kernel("quantize", heads * head_dim, GROUP, width=width)
        yield kernel("attention_join_quantize", heads, head_dim, GROUP, width=width)
    for shape, width in product(ATTENTIONS, NORM_WIDTHS):
        yield kernel("norm_rope_kv_write", *shape, POSITIONS, SLOTS, EPS, width=width)


def step_kernels() -> Iterator[Kernel]:
    for width in STEP_WIDTHS:
        yield kernel("step_rows", width=width)
        yield kernel("softmax_parts", STEP_VOCABULARY, rows=width)
        yield kernel("choose", STEP_VOCABULARY, rows=width)
        yield kernel("accept", STEP_VOCABULARY, rows=width)


def group_prompts() -> Iterator[Kernel]:
    """Linears of many rows, and those whose bits they must have."""
    for shape, form in product(GROUP_PROMPTS, GROUP_FORMATS):
        for width in (STEP_ROWS, *PROMPT_ROWS):
            yield group_linear(*shape, form, width)


def group_kernels() -> Iterator[Kernel]:
    for shape, form, width in product(GROUP_LINEARS, GROUP_FORMATS, GROUP_WIDTHS):
        yield group_linear(*shape, form, width)
    yield from group_prompts()
    for size, width in product(GROUP_SIZES, NORM_WIDTHS):
        yield kernel("norm_quantize", size, EPS, GROUP, width=width)
        yield kernel("quantize", size, GROUP, width=width)
        yield kernel("gated_quantize", size, GROUP, width=width)
        for form in GROUP_FORMATS:
            yield kernel("low_bit_embed", 70, size, "cuda", form, width=width)
    for shape, width in product(ATTENTIONS, NORM_WIDTHS):
        yield kernel("qk_norm", *shape, EPS, width=width)


def target_for(arch: str) -> Target:
    """A target of this arch, with the host of an x86-64 machine."""
    found = next(target for target in TARGETS.values() if target.arch == arch)
    return replace(found, host=X86_64)


def definition(item: Kernel) -> Any:
    """The PrimFunc of a kernel as `relax_models` defines it, at the kernel's dimensions."""
    from bitmtp_tvm.specialize import bind_dims
    from relax_models import (
        attention_ops,
        choose_ops,
        fused_attention_ops,
        fused_ops,
        head_ops,
        ops,
        step_ops,
    )

    modules = (
        ops,
        attention_ops,
        choose_ops,
        fused_attention_ops,
        fused_ops,
        head_ops,
        step_ops,
    )
    module = next(module for module in modules if hasattr(module, item.op))
    return bind_dims(getattr(module, item.op)(*item.arguments), dict(item.dims))


def picker(item: Kernel) -> Any:
    """What chooses the template and the tile that the kernel names, or the rule's."""
    from schedules.space import Choice, ruled

    def pick(work: Any, templates: Any, card: Any) -> Any:
        if not item.tile:
            return ruled(templates, work, card)
        name, *numbers = item.tile
        template = next(t for t in templates if t.name == name and t.serves(work, card))
        return Choice(template, template.tile(*numbers))

    return pick


def schedule(kernels: Sequence[Kernel], target: Target) -> Any:
    """An IRModule of the kernels as their rules make them, under their names."""
    import tvm

    from bitmtp_tvm.targets import tvm_target
    from schedules import rule
    from schedules.space import LARGE_CARD

    made = {}
    for item in kernels:
        scheduled = rule.apply(definition(item), tvm_target(target), LARGE_CARD, picker(item))
        made[item.name] = scheduled.with_attr("global_symbol", item.name)
    return tvm.IRModule(made)


def cuda_text(
    kernels: Sequence[Kernel], target: Target, made: Mapping[str, Any] | None = None
) -> str:
    """The CUDA text that TVM generates for kernels; it does not depend on the target's arch.

    `made`: scheduled functions beside them, by name.
    """
    from bitmtp_tvm.toolchain import prepare_cuda, register_nvrtc

    prepare_cuda()
    import tvm
    import tvm.support.nvcc
    import tvm_ffi

    from bitmtp_tvm.targets import tvm_target

    kept: list[str] = []

    def keep(text: str) -> bytes:
        kept.append(text)
        return b"\x7fELF"

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", keep, override=True)
    try:
        with tvm_target(target) as described:
            mod = schedule(kernels, target)
            mod.update(tvm.IRModule(dict(made or {})))
            tvm.tirx.build(mod, target=described)
    finally:
        register_nvrtc()
    (text,) = kept
    return text


def build(directory: Path, arch: str, ptx: bool = False) -> Path:
    """Build every kernel for `arch` into one library; returns its path.

    As `ptx` the kernels of one card run on any later one, whose driver compiles them.
    """
    from bitmtp_tvm.targets import tvm_target
    from bitmtp_tvm.toolchain import cross_compiler, prepare_cuda, register_nvrtc

    prepare_cuda()
    register_nvrtc(ptx=ptx)
    import tvm

    target = target_for(arch)
    with tvm_target(target) as described:
        library = tvm.tirx.build(schedule(list(all_kernels()), target), target=described)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LIBRARY
    library.export_library(str(path), fcompile=cross_compiler(target.host_triple))
    return path


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def nothing(*shape: int) -> np.ndarray:
    """A result that nobody has written."""
    return np.full(shape, np.nan, np.float32)


class Kernels:
    """A built library on the device."""

    def __init__(self, path: Path) -> None:
        from bitmtp_tvm.libraries import load_tvm_cuda

        load_tvm_cuda()
        import tvm

        self._runtime = tvm.runtime
        self._device = tvm.cuda(0)
        self._library = tvm.runtime.load_module(str(path))

    def function(self, item: Kernel) -> Any:
        """What launches a kernel on tensors of the device."""
        return self._library[item.name]

    def run(self, item: Kernel, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Call a kernel on copies of `arguments`; returns all of them afterwards."""
        tensors = [
            self._runtime.tensor(np.ascontiguousarray(array), self._device) for array in arguments
        ]
        self._library[item.name](*tensors)
        return [tensor.numpy() for tensor in tensors]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["build"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--ptx", action="store_true", help="for a later card than the arch")
    arguments = parser.parse_args(argv)
    print(build(arguments.directory, arguments.arch, arguments.ptx))


if __name__ == "__main__":
    main()
