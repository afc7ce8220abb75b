"""What a model predicts on held-out text: its losses, and how well its mask rows draft."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bitmtp_tvm.training.model import TrainableDecoder
from bitmtp_tvm.training.packing import Packed

_LOGITS = 1 << 26


@dataclass(frozen=True)
class Measures:
    """Over all held-out rows that count.

    ntp_loss: nats a token; accuracy: share of mask rows that name the true token, by position in
    the block; agreement: share that name what the clean row for the same token names;
    accepted_length: 1 + Σ_i P(the clean row and mask rows 1 … i all name the true text), tokens a
    forward on natural text. The last three are empty and 1 without mask rows.
    """

    ntp_loss: float
    accuracy: tuple[float, ...]
    agreement: tuple[float, ...]
    accepted_length: float


def measures_of(sums: Tensor) -> Measures:
    """Means of what `batch_sums` gave."""
    values = sums.tolist()
    ntp = values[0] / max(values[1], 1)
    rows = len(values[2:]) // 4
    right, same, chains, count = (values[2 + i * rows : 2 + (i + 1) * rows] for i in range(4))
    over = [max(c, 1.0) for c in count]

    def means(parts: list[float]) -> tuple[float, ...]:
        return tuple(p / c for p, c in zip(parts, over, strict=True))

    return Measures(ntp, means(right), means(same), 1 + sum(means(chains)))


@torch.no_grad()
def batch_sums(model: TrainableDecoder, packed: Packed) -> Tensor:
    """Sums behind `Measures` `(2 + 4K,)` float64, `(2,)` without mask rows; those of several
    batches or processes may be added."""
    hidden = model(packed.tokens, packed.positions, packed.mask)
    length = packed.length
    loss, clean = _next(model, hidden[:, :length], packed)
    parts = [loss, packed.ntp_weights.sum().double()]
    if packed.mask_targets.numel():
        rows = hidden[:, length:].flatten(0, 1)
        guess = torch.cat([model.logits(part).argmax(-1) for part in rows.split(_rows(model))])
        guess = guess.view(packed.mask_targets.shape)
        known = clean.gather(1, packed.teachers.flatten(1)).view_as(guess)
        parts += _mask_sums(packed, guess, known, clean)
    return torch.cat([part.reshape(-1).double() for part in parts])


def _mask_sums(packed: Packed, guess: Tensor, known: Tensor, clean: Tensor) -> list[Tensor]:
    """By position in the block: rows that are right, that agree, chains that hold, rows."""
    weight = packed.mask_weights.double()
    right = (guess == packed.mask_targets).double()
    anchors = packed.teachers[..., 0] - 1
    first = clean.gather(1, anchors) == packed.ntp_targets.gather(1, anchors)
    chain = right.cumprod(-1) * first.double()[..., None]
    same = (guess == known).double()
    return [(part * weight).sum((0, 1)) for part in (right, same, chain, torch.ones_like(right))]


def _next(model: TrainableDecoder, clean: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Summed loss of the clean rows, and the token that each names `(B, L)`."""
    rows, targets = clean.flatten(0, 1), packed.ntp_targets.flatten()
    weights, loss = packed.ntp_weights.flatten(), torch.zeros((), dtype=torch.float64)
    loss, named, size = loss.to(rows.device), [], _rows(model)
    for at in range(0, len(rows), size):
        logits = model.logits(rows[at : at + size])
        losses = functional.cross_entropy(logits, targets[at : at + size], reduction="none")
        loss = loss + (losses * weights[at : at + size]).sum().double()
        named.append(logits.argmax(-1))
    return loss, torch.cat(named).view_as(packed.ntp_targets)


def _rows(model: TrainableDecoder) -> int:
    return max(1, _LOGITS // model.config.vocab_size)
