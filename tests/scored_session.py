"""The fake model where logits are asked for: as a session's decode steps, and as a PyTorch module.

Both say the same of the same rows, and check that they are laid out as a model is trained.
"""

from types import SimpleNamespace

import numpy as np
import torch
from fake_model import FakeModel
from twin_session import TwinSession, mtp_of

from bitmtp_tvm.evaluation.rows import Masks
from bitmtp_tvm.reference.step import StepRows
from relax_models.config import MTPConfig


class ScoredSession(TwinSession):
    """A twin session with `decode` and `logits`; `widest`: rows of its largest decode step."""

    widest = 0

    def decode(self, tokens, positions, boundary, visible, logit_rows):
        rows = len(tokens)
        assert rows <= max(self.widths) and not self.under_way
        self.widest = max(self.widest, rows)
        seen = np.tri(rows, dtype=bool) if visible is None else visible
        bits = [sum(1 << i for i in np.flatnonzero(row).tolist()) for row in seen]
        asked = np.full(rows, -1, np.int32)
        asked[list(logit_rows)] = list(logit_rows)
        logits = self.model.forward(
            StepRows(
                np.array(tokens, np.int32),
                np.array(positions, np.int32),
                np.array([boundary], np.int32),
                np.array([[b & 0xFFFFFFFF, b >> 32] for b in bits], np.uint32),
                asked,
                np.zeros(rows, np.int32),
            )
        )
        self._logits = logits[list(logit_rows)]
        return self._logits.argmax(-1)

    def logits(self):
        return self._logits


class FakeDecoder(torch.nn.Module):
    """`FakeModel` in the clothes of a TrainableDecoder: what it calls hidden states are logits."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__()
        self.fake = model
        self.place = torch.nn.Parameter(torch.zeros(1))
        mtp = MTPConfig(**mtp_of(model))
        self.config = SimpleNamespace(
            vocab_size=model.vocab_size, max_position_embeddings=model.context, mtp=mtp
        )

    def forward(self, tokens, positions, mask):
        batch, rows = tokens.shape
        assert mask.shape == (batch, 1, rows, rows) and mask.dtype == torch.bool
        made = [
            self._sequence(*(part[i].numpy() for part in (tokens, positions, mask[:, 0])))
            for i in range(batch)
        ]
        return torch.from_numpy(np.array(made))

    def logits(self, hidden):
        return hidden

    def _sequence(self, tokens, positions, seen):
        model = self.fake
        clean = len(tokens) - int((tokens == model.mask_token).sum())
        digests = model.causal(tokens[:clean].tolist())
        made = []
        for row, position in enumerate(positions.tolist()):
            prefix = np.flatnonzero(seen[row, :clean])
            length = len(prefix)
            assert prefix.tolist() == list(range(length))
            own = np.flatnonzero(seen[row, clean:]) + clean
            if row < clean:
                assert position == row == length - 1 and not len(own)
                said = model._next(digests[row], row + 1), model.sharpness
            else:
                count = model.block_size if model.bidirectional else position - length + 1
                assert own.tolist() == list(range(own[0], own[0] + count)) and row in own
                assert positions[own].tolist() == list(range(length, length + count))
                last, total = digests[length - 1], sum(digests[:length])
                said = model._propose(total, last, length, position)
            made.append(model._logits(*said))
        return np.array(made)


def masks_of(model: FakeModel) -> Masks:
    return Masks(model.block_size, model.mask_token, model.bidirectional)


def written(model: FakeModel, length: int, first: int) -> list[int]:
    """`length` tokens that begin with `first` and go on as the model would."""
    return [first, *model.continuation([first], length - 1)]
