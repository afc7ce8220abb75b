"""Programmatic dependent launch: a kernel is on its way while the one before it still runs.

From compute capability 9.0 on a kernel can be launched early, and then waits on the device for the
one before it to end: what launching costs, and what a kernel does before it waits, is hidden. Every
kernel lets the next one go at once and waits before anything else, unless its text places the wait
itself, behind loads of weights, which no kernel writes.
"""

import re
from typing import Any

LEAST_MAJOR = 9

_LET_GO = 'asm volatile("griddepcontrol.launch_dependents;");'
# The clobber keeps every load and store behind the wait.
_WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
_KERNEL = re.compile(r'^extern "C" __global__ void [^;{]*\) \{$', re.MULTILINE)

# TVM's own name of the tag, and of the one that has to stay last.
_TAG = "tirx.use_programtic_dependent_launch"
_PARAMETERS = "tirx.kernel_launch_params"
_SHARED = "tirx.use_dyn_shared_memory"


def overlaps(arch: str) -> bool:
    """Whether a card of this architecture ("sm_90a") knows such launches."""
    digits = re.sub(r"\D", "", arch)
    return int(digits[:-1]) >= LEAST_MAJOR


def with_waits(source: str) -> str:
    """CUDA text whose kernels let the next one go and wait for the one before.

    No pointer stays `__restrict__`: what a compiler knows to be constant for the length of a kernel
    it loads in front of the wait, where the kernel before may still be writing it.
    """
    source = source.replace(" __restrict__", "")
    starts = [found.end() for found in _KERNEL.finditer(source)]
    pieces, last = [], 0
    for start, end in zip(starts, [*starts[1:], len(source)], strict=True):
        pieces.append(source[last:start])
        if not re.search(r"griddepcontrol[._]wait", source[start:end]):
            pieces.append(f"\n  {_LET_GO}\n  {_WAIT}")
        last = start
    return "".join([*pieces, source[last:]])


def tag_launches() -> None:
    """Make TVM launch the kernels of overlapping architectures early, from now on."""
    import tvm_ffi

    build = _original_build()

    def tagged_build(mod: Any, target: Any) -> Any:
        return build(_tagged(mod) if overlaps(str(target.attrs["arch"])) else mod, target)

    tvm_ffi.register_global_func("target.build.cuda", tagged_build, override=True)


def _tagged(mod: Any) -> Any:
    for var, func in list(mod.functions_items()):
        tags = [str(tag) for tag in func.attrs.get(_PARAMETERS, [])]
        last = [_SHARED] if _SHARED in tags else []
        kept = [tag for tag in tags if tag not in (_SHARED, _TAG)]
        mod.update_func(var, func.with_attr(_PARAMETERS, [*kept, _TAG, *last]))
    return mod


_BUILD: list[Any] = []


def _original_build() -> Any:
    """TVM's own function, looked up before it is replaced for the first time."""
    if not _BUILD:
        import tvm_ffi

        _BUILD.append(tvm_ffi.get_global_func("target.build.cuda"))
    return _BUILD[0]
