"""What a model says about held-out windows, whoever computes it: PyTorch or a compiled artifact.

Clean row i of a window sees tokens 0..i and predicts token i+1. At an anchor i there are mask rows
1..K at positions i+1..i+K; they see what clean row i sees and their own block (causal: up to
themselves), and mask row j predicts token i+j+1. That is the layout that models are trained in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bitmtp_tvm.errors import UsageError


@dataclass(frozen=True)
class Masks:
    """How a model's mask rows work; `count`: of a block."""

    count: int
    token: int
    bidirectional: bool

    def visible(self) -> np.ndarray:
        """Which rows of [clean row, mask rows] a row sees: bool `(1 + count, 1 + count)`."""
        seen = np.tri(1 + self.count, dtype=bool)
        if self.bidirectional:
            seen[1:, 1:] = True
        return seen


@dataclass(frozen=True)
class WindowRows:
    """One window of L tokens, with A anchors of K mask rows each (A = 0: none were asked for).

    `tokens` `(L,)` int64. `nll`, `top` `(L - 1,)`: of clean row i, the negative natural logarithm
    of the probability of token i+1, and the likeliest token. `anchors` `(A,)`; `mask_top`,
    `confidence` `(A, K)`: the likeliest token of a mask row and its probability at temperature 1.
    """

    tokens: np.ndarray
    nll: np.ndarray
    top: np.ndarray
    anchors: np.ndarray
    mask_top: np.ndarray
    confidence: np.ndarray


class RowModel(Protocol):
    """What computes rows; `masks` is None for a model without multi-token prediction."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def masks(self) -> Masks | None: ...

    @property
    def context(self) -> int: ...

    def rows(self, windows: np.ndarray, anchors: np.ndarray) -> Iterator[WindowRows]:
        """The rows of `windows` `(N, L)` int64 with anchors `(N, A)`, ascending in a window."""

    def nll(self, tokens: Sequence[int]) -> np.ndarray:
        """`(L - 1,)` float64: of every token but the first, after those before it."""


def choose_anchors(
    windows: int, length: int, masks: Masks | None, count: int, seed: int
) -> np.ndarray:
    """Anchors `(windows, count)` int64, ascending, drawn without replacement in every window.

    All that mask rows predict lies in the window. Fewer than `count` where a window has no more
    places, none for a model without masks. Raises `UsageError` for windows without room for one.
    """
    if masks is None or not count:
        return np.zeros((windows, 0), np.int64)
    places = length - masks.count - 1
    if places < 1:
        raise UsageError(
            f"windows of {length} tokens have no room for {masks.count} mask rows: give --length "
            f"{masks.count + 2} or more"
        )
    rng = np.random.default_rng(seed)
    drawn = [rng.permutation(places)[:count] for _ in range(windows)]
    return np.sort(np.array(drawn, np.int64), axis=1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide
