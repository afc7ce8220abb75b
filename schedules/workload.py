"""What a rule knows of a PrimFunc: its stamp and the static shapes of its buffers."""

from dataclasses import dataclass
from typing import Any

from tvm import tirx

PREFIX = "bitmtp."

NEG_INF = -3.0e38
"""Score of a slot that a row does not see, as relax_models.ops defines it."""


@dataclass(frozen=True)
class Workload:
    """One stamped operation at static shapes.

    op: `bitmtp.op`; settings: the other `bitmtp.*` attributes as Python values; shapes, dtypes: of
    the buffers in the order of the parameters, inputs first.
    """

    op: str
    settings: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @property
    def width(self) -> int:
        """Rows of the result: of this step, or those that ask for logits."""
        return self.shapes[-1][0]


def read(func: tirx.PrimFunc) -> Workload:
    """The workload of a specialised PrimFunc; a symbolic shape or missing stamp is a ValueError."""
    attributes = dict(func.attrs.items()) if func.attrs else {}
    settings = {
        name.removeprefix(PREFIX): _plain(value)
        for name, value in attributes.items()
        if name.startswith(PREFIX)
    }
    if "op" not in settings:
        raise ValueError(f"no {PREFIX}op on this function: {sorted(attributes)}")
    buffers = [param.ty for param in func.params]
    shapes = tuple(tuple(_static(dim) for dim in buffer.shape) for buffer in buffers)
    return Workload(settings.pop("op"), settings, shapes, tuple(str(b.dtype) for b in buffers))


def _static(dim: Any) -> int:
    if not isinstance(dim, int | tirx.IntImm):
        raise ValueError(f"a schedule needs static shapes, and {dim} is symbolic")
    return int(dim)


def _plain(value: Any) -> Any:
    """Attributes come back as TVM's own boxes: strip them."""
    if isinstance(value, tirx.FloatImm):
        return float(value.value)
    if isinstance(value, tirx.IntImm):
        return bool(value.value) if str(value.dtype) == "bool" else int(value.value)
    if isinstance(value, str | bool | int | float):
        return value
    return [_plain(item) for item in value]


def scheduled(template: tirx.PrimFunc, original: tirx.PrimFunc) -> tirx.PrimFunc:
    """`template` under the stamp of `original`, marked so that no later pass schedules it again."""
    stamp = {k: v for k, v in original.attrs.items() if k.startswith(PREFIX)}
    marks = {"tirx.noalias": True, "tirx.is_scheduled": True}
    return template.with_attr({**stamp, **marks})


def segment_scale(weight_scale: tirx.Var, n, segments: list[int]):
    """The scale of the original matrix that row `n` of a fused one comes from."""
    value, first = weight_scale[0], 0
    for i, rows in enumerate(segments[:-1]):
        first += rows
        value = tirx.if_then_else(n >= first, weight_scale[i + 1], value)
    return value


def is_nan(x):
    """True for a float32 NaN, asked of its bits: TVM takes `x == x` for granted."""
    magnitude = tirx.reinterpret("uint32", x) & tirx.const(0x7FFFFFFF, "uint32")
    return magnitude > tirx.const(0x7F800000, "uint32")
