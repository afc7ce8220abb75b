"""Rows by a compiled artifact, in its decode buckets: what decoding on this device sees."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.evaluation.rows import Masks, WindowRows, log_softmax


class LogitSession(Protocol):
    """What is needed of a session: see `bitmtp_tvm.session.Session`."""

    @property
    def context(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def widths(self) -> Sequence[int]: ...

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        boundary: int,
        visible: np.ndarray | None,
        logit_rows: Sequence[int],
    ) -> np.ndarray: ...

    def logits(self) -> np.ndarray: ...


class ArtifactRows:
    """A `RowModel` over a session, whose K/V it overwrites: reset the engine afterwards."""

    def __init__(self, session: LogitSession, masks: Masks | None, name: str) -> None:
        self.session, self.masks, self.name = session, masks, name
        self.vocab_size, self.context = session.vocab_size, session.context

    def rows(self, windows: np.ndarray, anchors: np.ndarray) -> Iterator[WindowRows]:
        """See `RowModel`. Raises `UsageError` for buckets too narrow for a block of mask rows."""
        if anchors.size:
            self._check_width()
        for tokens, places in zip(windows, anchors, strict=True):
            nll, top = self._clean(tokens)
            mask_top, confidence = self._blocks(tokens, places)
            yield WindowRows(tokens, nll, top, places, mask_top, confidence)

    def nll(self, tokens: Sequence[int]) -> np.ndarray:
        return self._clean(np.asarray(tokens))[0]

    def _check_width(self) -> None:
        assert self.masks is not None
        widest, rows = max(self.session.widths), 1 + self.masks.count
        if widest < rows:
            raise UsageError(
                f"this artifact's widest decode bucket has {widest} rows and its mask rows need "
                f"{rows}: compile with a wider bucket, or leave mask rows out with --anchors 0"
            )

    def _clean(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`nll` and `top` of `WindowRows`; leaves the K/V of all but the last token."""
        nll, top = [], []
        widest = max(self.session.widths)
        for start in range(0, len(tokens) - 1, widest):
            stop = min(start + widest, len(tokens) - 1)
            count = range(stop - start)
            part = tokens[start:stop].tolist()
            self.session.decode(part, range(start, stop), start, None, count)
            logits = log_softmax(self.session.logits())
            nll.append(-logits[count, tokens[start + 1 : stop + 1]])
            top.append(logits.argmax(-1))
        if not nll:
            return np.zeros(0), np.zeros(0, np.int64)
        return np.concatenate(nll), np.concatenate(top)

    def _blocks(self, tokens: np.ndarray, anchors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`mask_top` and `confidence` of `WindowRows`, behind the K/V that `_clean` left."""
        masks, shape = self.masks, (len(anchors), self.masks.count if self.masks else 0)
        top, confidence = np.zeros(shape, np.int64), np.zeros(shape)
        if masks is None:
            return top, confidence
        # From the last one back: a block is written over the slots behind its anchor.
        for place in reversed(range(len(anchors))):
            anchor = int(anchors[place])
            rows = [int(tokens[anchor]), *[masks.token] * masks.count]
            positions = range(anchor, anchor + len(rows))
            self.session.decode(rows, positions, anchor, masks.visible(), range(1, len(rows)))
            logits = log_softmax(self.session.logits())
            top[place], confidence[place] = logits.argmax(-1), np.exp(logits.max(-1))
        return top, confidence
