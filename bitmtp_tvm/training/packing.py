"""Clean rows and mask blocks of one forward: tokens, positions, who sees whom, and the targets.

A sequence of L + 1 tokens gives L clean rows, then A blocks of K mask rows. Clean row i predicts
token i + 1. Block a with anchor i stands at positions i + 1 … i + K; its row j predicts token
i + j + 1. Clean rows see clean rows up to themselves; mask rows see clean rows up to their anchor
and rows of their own block. Nobody sees across the start of a document, and a target behind the end
of one's own document counts for nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from relax_models.config import BLOCK_ATTENTIONS

# Rows and columns of a block of a BlockMask.
FLEX_BLOCK = 128


@dataclass(frozen=True)
class Packed:
    """One batch, ready for a forward pass; T = length + anchors * block_size rows a sequence.

    tokens, positions `(B, T)` int64; mask: a BlockMask, or `(B, 1, T, T)` bool. ntp_targets
    `(B, L)` int64 and ntp_weights `(B, L)` float32, 0 where a target does not count; mask_targets,
    mask_weights `(B, A, K)` likewise; teachers `(B, A, K)` int64: the clean row that predicts the
    same token as the mask row.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor | BlockMask
    ntp_targets: Tensor
    ntp_weights: Tensor
    mask_targets: Tensor
    mask_weights: Tensor
    teachers: Tensor

    @property
    def length(self) -> int:
        """Clean rows of a sequence."""
        return self.ntp_targets.shape[1]

    @property
    def block_size(self) -> int:
        """Mask rows of a block."""
        return self.mask_targets.shape[2]


def pack(
    tokens: Tensor,
    anchors: Tensor,
    block_size: int,
    block_attention: str,
    *,
    mask_token_id: int,
    documents: Tensor | None = None,
    flex: bool = False,
) -> Packed:
    """Lay out a batch: tokens `(B, L + 1)` int64, anchors `(B, A)` int64, each in [0, L - K - 1].

    `documents` `(B, L + 1)`: the number of each token's document, ascending; None: all one.
    `flex`: a BlockMask instead of a dense mask, for which L and A · K must be multiples of 128. A
    may be 0. Raises ValueError for anchors or sizes that do not fit.
    """
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    _check(length, anchors, block_size, block_attention)
    if documents is None:
        documents = torch.zeros_like(tokens)
    offsets = torch.arange(1, block_size + 1, device=tokens.device)
    teachers = anchors[:, :, None] + offsets
    rows = torch.arange(length, device=tokens.device).expand(batch, length)
    masks = torch.full_like(teachers.flatten(1), mask_token_id)
    target_documents = _at(documents, teachers + 1)
    return Packed(
        tokens=torch.cat([tokens[:, :-1], masks], dim=1),
        positions=torch.cat([rows, teachers.flatten(1)], dim=1),
        mask=_mask(documents[:, :-1], anchors, block_size, block_attention, flex),
        ntp_targets=tokens[:, 1:],
        ntp_weights=(documents[:, 1:] == documents[:, :-1]).float(),
        mask_targets=_at(tokens, teachers + 1),
        mask_weights=(target_documents == _at(documents, anchors)[:, :, None]).float(),
        teachers=teachers,
    )


def _check(length: int, anchors: Tensor, block_size: int, block_attention: str) -> None:
    if block_attention not in BLOCK_ATTENTIONS:
        raise ValueError(f"block_attention is {block_attention!r}; known: {BLOCK_ATTENTIONS}")
    if anchors.shape[1] and length < block_size + 1:
        raise ValueError(f"{length} tokens have no room for a block of {block_size} mask rows")


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values `(B, L)` at index `(B, …)`."""
    return values.gather(1, index.flatten(1)).view(index.shape)


def document_numbers(tokens: Tensor, bos: int | None, eos: int | None) -> Tensor:
    """Number of the document of each token `(B, L)`: one begins at a bos, or behind an eos."""
    if bos is not None:
        return (tokens == bos).long().cumsum(1)
    if eos is None:
        return torch.zeros_like(tokens)
    ended = (tokens == eos).long().cumsum(1)
    return torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], dim=1)


def _mask(
    documents: Tensor, anchors: Tensor, block_size: int, block_attention: str, flex: bool
) -> Tensor | BlockMask:
    """Who sees whom, of documents `(B, L)` and anchors `(B, A)`.

    A row sees two runs of rows: clean ones from `start` to `limit`, and of its own block those from
    `first` to `last`, none for a clean row.
    """
    length, count = documents.shape[1], anchors.shape[1]
    device = documents.device
    # The first row of each row's own document: documents ascend, so it is where theirs begins.
    begun = torch.searchsorted(documents.contiguous(), documents.contiguous())
    rows = torch.arange(length, device=device)
    start = torch.cat([begun, _at(begun, anchors).repeat_interleave(block_size, 1)], dim=1)
    limit = torch.cat([rows.expand_as(documents), anchors.repeat_interleave(block_size, 1)], dim=1)
    behind = length + torch.arange(count * block_size, device=device)
    opened = behind - (behind - length) % block_size
    closed = behind if block_attention == "causal" else opened + block_size - 1
    first = torch.cat([torch.zeros_like(rows), opened])
    last = torch.cat([torch.full_like(rows, -1), closed])
    if flex:
        return _flex_mask(start, limit, first, last, length)
    seen = torch.arange(length + len(behind), device=device)
    clean = (seen >= start[..., None]) & (seen <= limit[..., None])
    return (clean | ((seen >= first[:, None]) & (seen <= last[:, None])))[:, None]


def _flex_mask(start: Tensor, limit: Tensor, first: Tensor, last: Tensor, length: int) -> BlockMask:
    """The same as blocks of 128 by 128: start, limit `(B, T)`, first, last `(T,)`.

    Which blocks hold anything is worked out from the rows' bounds: asking the rule for every pair,
    as `create_block_mask` does, would cost more than the attention.
    """
    batch, total = start.shape
    if length % FLEX_BLOCK or total % FLEX_BLOCK:
        raise ValueError(
            f"{length} clean and {total - length} mask rows: both must be multiples of {FLEX_BLOCK}"
        )
    # Attention looks them up for every pair of a block that is not full: 64 bits would double that.
    start, limit, first, last = (bound.int() for bound in (start, limit, first, last))

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        clean = (kv >= start[b, q]) & (kv <= limit[b, q])
        return clean | ((kv >= first[q]) & (kv <= last[q]))

    # Of each block of rows: the least and the largest of every bound, `(B, T / 128)`.
    starts, limits = (t.view(batch, -1, FLEX_BLOCK) for t in (start, limit))
    low = torch.arange(0, total, FLEX_BLOCK, device=start.device)
    high = low + FLEX_BLOCK - 1
    some = (starts.amin(-1)[..., None] <= high) & (limits.amax(-1)[..., None] >= low)
    full = (starts.amax(-1)[..., None] <= low) & (limits.amin(-1)[..., None] >= high)
    firsts, lasts = (t.view(-1, FLEX_BLOCK) for t in (first, last))
    own = (firsts.amin(-1)[:, None] <= high) & (lasts.amax(-1)[:, None] >= low)
    partial = (some & ~full) | own
    return BlockMask.from_kv_blocks(
        *_listed(partial[:, None]),
        *_listed(full[:, None]),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=sees,
        seq_lengths=(total, total),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks `(B, 1, Q, KV)` bool -> how many each row of blocks has, and which, those first."""
    count = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
    return count, order.to(torch.int32)
