"""The joint objective: next token and several tokens at once, in one packed forward.

loss = CE_NTP + λ · Σ_j g^(j-1) [(1 - s) CE(m_j) + s KL(stop-grad p(· | clean) ‖ q(m_j))] / Σ_j
g^(j-1), each a mean over the rows that count. The teacher of a mask row is the clean row that
predicts the same token in the same forward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bitmtp_tvm.training.measures import batch_sums
from bitmtp_tvm.training.model import TrainableDecoder
from bitmtp_tvm.training.packing import Packed, document_numbers, pack

__all__ = ["Losses", "Objective", "Packed", "Weights", "document_numbers", "joint_loss", "pack"]

# Logits at a time, in elements: a quarter of a gigabyte of float32.
_LOGITS = 1 << 26

# Hidden states, targets and weights of some rows -> sum of their losses.
_NextSum = Callable[[Tensor, Tensor, Tensor], Tensor]
# Likewise with the teachers' hidden states -> sums of CE and of KL.
_MaskSums = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Weights:
    """What the parts of the objective count: λ, g, and s, the share of what the teacher says."""

    mtp: float = 0.3
    decay: float = 0.85
    kl_share: float = 1.0


@dataclass(frozen=True)
class Losses:
    """Sums over rows, each `()` float32, by their weight; means are sums over counts."""

    total: Tensor
    ntp: Tensor
    mask_ce: Tensor
    mask_kl: Tensor


def counts(packed: Packed, weights: Weights) -> Tensor:
    """What the sums of a batch are divided by: weight of the clean rows and of the mask rows."""
    decayed = packed.mask_weights * _decayed(packed, weights)
    return torch.stack([packed.ntp_weights.sum(), decayed.sum()])


def _decayed(packed: Packed, weights: Weights) -> Tensor:
    steps = torch.arange(packed.block_size, device=packed.mask_weights.device)
    return weights.decay ** steps.float()


def joint_loss(
    model: TrainableDecoder,
    packed: Packed,
    weights: Weights,
    divisors: Tensor | None = None,
    heads: "Heads | None" = None,
) -> Losses:
    """The losses of a batch, of which `total` has a gradient.

    `divisors` `(2,)` float32: what the sums are divided by, where a step has several batches;
    default the batch's own `counts`.
    """
    divisors = counts(packed, weights) if divisors is None else divisors
    divisors = divisors.clamp(min=1e-6)
    heads = heads or Heads(model)
    hidden = model(packed.tokens, packed.positions, packed.mask)
    length = packed.length
    clean = hidden[:, :length]
    ntp = heads.next(clean, packed.ntp_targets, packed.ntp_weights) / divisors[0]
    if not packed.mask_targets.numel():
        zero = torch.zeros_like(ntp)
        return Losses(ntp, ntp.detach(), zero, zero)
    index = packed.teachers.flatten(1)[..., None].expand(-1, -1, hidden.shape[-1])
    teachers = clean.detach().gather(1, index)
    decayed = packed.mask_weights * _decayed(packed, weights)
    sums = heads.masks(hidden[:, length:], teachers, packed.mask_targets, decayed)
    ce, kl = (sums / divisors[1]).unbind()
    drafts = (1 - weights.kl_share) * ce + weights.kl_share * kl
    return Losses(ntp + weights.mtp * drafts, ntp.detach(), ce.detach(), kl.detach())


class Heads:
    """Losses from hidden states, some rows at a time, so that few logits exist at once.

    The logits are made again on the way back. `compiled`: run each piece as one compiled graph.
    """

    def __init__(self, model: TrainableDecoder, compiled: bool = False) -> None:
        self._model = model
        self._rows = max(1, _LOGITS // model.config.vocab_size)
        self._next: _NextSum = self._next_sum
        self._masks: _MaskSums = self._mask_sums
        if compiled:
            self._next = torch.compile(self._next_sum, dynamic=False)
            self._masks = torch.compile(self._mask_sums, dynamic=False)

    def next(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Σ weight · CE over hidden `(B, L, H)`, targets and weights `(B, L)`."""
        rows = hidden.flatten(0, 1), targets.flatten(), weights.flatten()
        return self._summed(self._next, *rows)

    def masks(self, hidden: Tensor, teachers: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Σ weight · CE and Σ weight · KL `(2,)`: hidden, teachers `(B, A·K, H)`."""
        rows = hidden.flatten(0, 1), teachers.flatten(0, 1), targets.flatten(), weights.flatten()
        return self._summed(self._masks, *rows)

    def _summed(self, piece: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """The sum of `piece` over all rows, a part of them at a time."""
        count = len(rows[0])
        size = -(-count // -(-count // self._rows))
        parts = zip(*(part.split(size) for part in rows), strict=True)
        sums = [checkpoint(piece, *part, use_reentrant=False) for part in parts]
        return torch.stack(sums).sum(0)

    def _next_sum(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        logits = self._model.logits(hidden)
        return (functional.cross_entropy(logits, targets, reduction="none") * weights).sum()

    def _mask_sums(
        self, hidden: Tensor, teachers: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        guess = self._model.logits(hidden).log_softmax(-1)
        with torch.no_grad():
            known = self._model.logits(teachers).log_softmax(-1)
        ce = -guess.gather(-1, targets[:, None])[:, 0]
        kl = (known.exp() * (known - guess)).sum(-1)
        return torch.stack([(ce * weights).sum(), (kl * weights).sum()])


class Objective(nn.Module):
    """Model and loss as one module, so that what shards parameters sees every use of them."""

    def __init__(self, decoder: TrainableDecoder, weights: Weights, compiled: bool = False):
        super().__init__()
        self.decoder = decoder
        self.weights = weights
        self.heads = Heads(decoder, compiled)

    def forward(self, packed: Packed, divisors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss to go back from, and `(4,)` for the logs: total, NTP, mask CE, mask KL.

        Without `divisors` nothing is trained: twice what `measures.batch_sums` gives.
        """
        if divisors is None:
            sums = batch_sums(self.decoder, packed)
            return sums, sums
        losses = joint_loss(self.decoder, packed, self.weights, divisors, self.heads)
        parts = [losses.total.detach(), losses.ntp, losses.mask_ce, losses.mask_kl]
        return losses.total, torch.stack(parts)
