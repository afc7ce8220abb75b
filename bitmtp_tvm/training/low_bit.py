"""Low-bit linears for training: the compiler's codes and scales, with straight-through gradients.

Latent weights are float32 parameters that are rounded to bfloat16 before anything is made of them,
so the model that is trained and measured is the one that is saved. Codes and scales are then those
of `bitmtp_tvm.checkpoint.hf_weights.Master` and of `relax_models.quantizers`, and the activations'
those of `relax_models.ops.quantize`, bit for bit for the same inputs.

Whole numbers up to 256 are exact in bfloat16 and tensor cores sum products in float32, so with
K · 127 < 2^24 the bfloat16 product of int8 activations and ternary weights is the integer sum that
the compiled kernels give. With scales by groups the values are dequantised first and multiplied in
float32; on a GPU that is TF32, exact for a float16 scale, and rounding for an activation.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relax_models.formats import FORMATS, K_BLOCK
from relax_models.quantizers import Quantizer

_LEAST_ABSMAX = 1e-5
_LEAST_MEAN = 1e-5
_MOST_EXACT = 1 << 24


@torch.library.custom_op("bitmtp::product", mutates_args=())
def product(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    """a @ b, each transposed if asked for: two matrices of one float type -> float32.

    An operation of its own, because the sums must stay float32: a product of bfloat16 matrices
    would round them.
    """
    a = a.t() if transpose_a else a
    b = b.t() if transpose_b else b
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@product.register_fake
def _(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Tensor:
    rows, columns = a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1]
    return a.new_empty((rows, columns), dtype=torch.float32)


def bfloat16_values(x: Tensor) -> Tensor:
    """x float32, rounded to bfloat16 and kept as float32; its gradient is that of x.

    Through the bits, because torch.compile leaves out a cast that is undone at once.
    """
    bits = x.detach().contiguous().view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    # Both terms are exact, and so is their sum.
    return x + (rounded.view(torch.float32) - x.detach())


def _quotient(numerator: float | Tensor, denominator: Tensor) -> Tensor:
    """A float32 quotient, rounded once: compiled GPU code divides float32 only nearly."""
    # 53 bits are enough for the second rounding to change nothing.
    return (numerator / denominator.double()).float()


def quantise_rows(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """int8 activations: x `(R, K)` float32 -> codes `(R, K)` float32 and scales.

    Scales are `(R, 1)` float32, with `group` `(R, K / group)`: what one unit of a code stands for.
    The rule is that of `relax_models.ops.quantize`.
    """
    parts = x.unflatten(-1, (-1, group)) if group else x
    bound = parts.abs().amax(-1, keepdim=True).clamp(min=_LEAST_ABSMAX)
    codes = (parts * _quotient(127.0, bound)).round().clamp(-128, 127)
    scale = _quotient(bound.double(), torch.full_like(bound, 127.0))
    return (codes.flatten(-2), scale.squeeze(-1)) if group else (codes, scale)


def ternary_matrix(latent: Tensor) -> tuple[Tensor, Tensor]:
    """BitNet's rule: latent `(N, K)` -> weights `(N, K)` float32 in {-1, 0, 1}, scale `()` float32.

    scale = max(mean|w|, 1e-5) of the matrix, weight = clip(round(w / scale), -1, 1).
    """
    values = bfloat16_values(latent)
    total = values.abs().sum(dtype=torch.float64)
    scale = (total / values.numel()).clamp(min=_LEAST_MEAN).float()
    return (values * _quotient(1.0, scale)).round().clamp(-1, 1), scale


def group_weights(latent: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """A rule of `relax_models.quantizers`: latent `(N, K)` -> signs and scales.

    Signs `(N, K)` float32 in {-1, 0, 1}; scales `(N, K / 128)` float32 that float16 holds exactly.
    """
    values = bfloat16_values(latent).unflatten(-1, (-1, K_BLOCK))
    magnitude = values.abs()
    mean = magnitude.sum(-1, dtype=torch.float64) / K_BLOCK
    if FORMATS[quantizer.format].bits == 1:
        signs = torch.where(values >= 0, 1.0, -1.0)
        return signs.flatten(-2), _float16(mean)
    kept = magnitude > (quantizer.threshold * mean).float()[..., None]
    if quantizer.name == "ternary-g128":
        total = torch.where(kept, magnitude, 0.0).sum(-1, dtype=torch.float64)
        exact = total / kept.sum(-1).clamp(min=1)
    else:
        largest = magnitude.amax(-1)
        ready = (~kept | (magnitude == largest[..., None])).all(-1)
        ready = ready & (kept | (magnitude == 0)).all(-1)
        exact = torch.where(ready, largest.double(), mean)
    scales = _float16(exact)
    signs = torch.where(kept & (scales[..., None] != 0), values.sign(), 0.0)
    return signs.flatten(-2), scales


def _float16(exact: Tensor) -> Tensor:
    """float64, at least 0, rounded to float16 once, as float32: PyTorch goes by way of float32."""
    exponent = ((exact.float().view(torch.int32) >> 23) - 127).clamp(min=-14)
    unit = ((exponent.long() - 10 + 1023) << 52).view(torch.float64)
    return ((exact / unit).round() * unit).float()


class _StraightThrough(torch.autograd.Function):
    """`value` on the way forward, the gradient of `x` as if it were x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def rounded_rows(x: Tensor, group: int) -> Tensor:
    """What int8 codes with a scale for each `group` columns leave of x `(R, K)` float32."""
    codes, scale = quantise_rows(x.detach(), group)
    value = (codes.unflatten(-1, (-1, group)) * scale[..., None]).flatten(-2)
    return _StraightThrough.apply(x, value) if torch.is_grad_enabled() else value


def rounded_weights(latent: Tensor, quantizer: Quantizer) -> Tensor:
    """What a rule leaves of latent weights `(N, K)`, float32."""
    signs, scales = group_weights(latent.detach(), quantizer)
    value = (signs.unflatten(-1, (-1, K_BLOCK)) * scales[..., None]).flatten(-2)
    return _StraightThrough.apply(latent, value) if torch.is_grad_enabled() else value


def _multiplied(
    x: Tensor, dtype: torch.dtype, latents: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x `(R, K)` times all matrices, and what the way back needs: codes, scale, weight, scales."""
    codes, scale = quantise_rows(x)
    parts = [ternary_matrix(latent) for latent in latents]
    weight = torch.cat([signs for signs, _ in parts]).to(dtype)
    weight_scale = torch.cat([unit.expand(len(signs)) for signs, unit in parts])
    exact = product(codes.to(dtype), weight, False, True)
    y = exact * (scale * weight_scale)
    return y, (codes.to(torch.int8), scale, weight, weight_scale)


class _MatrixLinear(torch.autograd.Function):
    """BitNet's linear over matrices that share their input; see `matrix_linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, *latents: Tensor) -> Tensor:
        y, kept = _multiplied(x, dtype, latents)
        ctx.rows = [len(latent) for latent in latents]
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale, weight, weight_scale = ctx.saved_tensors
        into_x = into_weight = None
        if ctx.needs_input_grad[0]:
            into_x = product((gradient * weight_scale).to(weight.dtype), weight, False, False)
        if any(ctx.needs_input_grad[2:]):
            scaled = (gradient * scale).to(weight.dtype)
            into_weight = product(scaled, codes.to(weight.dtype), True, False)
        split = [None] * len(ctx.rows) if into_weight is None else into_weight.split(ctx.rows)
        return into_x, None, *split


def check_exact(size: int) -> None:
    """Raise ValueError for rows so long that float32 cannot hold the sums of `matrix_linear`."""
    if size * 128 >= _MOST_EXACT:
        raise ValueError(f"rows of {size} are too long for exact sums in float32")


def matrix_linear(x: Tensor, latents: list[Tensor], dtype: torch.dtype) -> Tensor:
    """int8 activations times ternary weights with one scale a matrix.

    x `(…, K)` float32, latents `(N_i, K)`, `dtype` what is multiplied (bfloat16 or float32) ->
    `(…, ΣN_i)` float32. Gradients take both roundings for the identity. ValueError for a K whose
    sums float32 cannot hold.
    """
    size = x.shape[-1]
    check_exact(size)
    rows = x.reshape(-1, size)
    # Without gradients no Function is needed, and torch.compile does not trace one there.
    if torch.is_grad_enabled():
        y = _MatrixLinear.apply(rows, dtype, *latents)
    else:
        y, _ = _multiplied(rows, dtype, latents)
    return y.view(*x.shape[:-1], y.shape[-1])


class _TableProduct(torch.autograd.Function):
    """x `(R, H)` times a table `(V, H)` transposed, in their type, summed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(x, table)
        return product(x, table, False, True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, table = ctx.saved_tensors
        narrow = gradient.to(x.dtype)
        into_x = product(narrow, table, False, False)
        return into_x.to(x.dtype), product(narrow, x, True, False).to(table.dtype)


def table_product(x: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits: x `(…, H)` float32, table `(V, H)` of bfloat16 values -> `(…, V)` float32.

    `dtype` is what both are multiplied in; bfloat16 rounds x, which the compiled head does not.
    """
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    if torch.is_grad_enabled():
        y = _TableProduct.apply(rows, table.to(dtype))
    else:
        y = product(rows, table.to(dtype), False, True)
    return y.view(*x.shape[:-1], y.shape[-1])
