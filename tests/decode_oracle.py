"""The four ways to decode, on plain lists: what the state machine of the decode step must do.

No state words, no K/V, no kernels. A step is `rows`, the model's answers, `take`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Choice:
    """What may change between two steps: the bucket and what it is filled with."""

    width: int = 16
    layout: str = "chain"
    masks: int = 4
    most_drafts: int = 7
    most_chain: int = 15


@dataclass(frozen=True)
class Request:
    """One generation. `limit`: tokens that the sequence may have, prompt included."""

    prompt: tuple[int, ...]
    limit: int
    mode: str = "speculative"
    min_chain: int = 3
    threshold: float = 0.9
    draft_threshold: float = 0.5
    stops: frozenset[int] = frozenset()
    bidirectional: bool = False
    penalty: float = 1.0


class Row(NamedTuple):
    """One row. `sees`: rows of its step; `known`: the tokens behind which it stands.

    `asks`: whether the step needs its logits.
    """

    kind: str
    token: int | None
    position: int
    sees: frozenset[int]
    known: tuple[int, ...]
    asks: bool


class Answer(NamedTuple):
    """The choice of a row; token -1: it had no finite logit."""

    token: int
    confidence: float
    logprob: float


class Committed(NamedTuple):
    token: int
    kind: str
    logprob: float


class Oracle:
    """`tokens[:materialised]` are in the cache, the rest is pending and then come the drafts."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.committed: list[Committed] = []
        self.materialised = len(self.tokens) - 1
        self.drafts: list[int] = []
        self.finish: str | None = None
        self.counts: Counter[tuple[str, int] | str] = Counter()

    def rewind(self, length: int) -> None:
        """The host found a stop string: the sequence ends at `length`, and may go on from there."""
        del self.tokens[length:], self.committed[length - len(self.request.prompt) :]
        self.materialised = min(self.materialised, length - 1)
        self.drafts, self.finish = [], None

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.materialised :]

    def rows(self, choice: Choice) -> list[Row]:
        """The rows of the next step, without padding; none where it can do nothing."""
        pending = self.pending
        if self.finish or len(pending) > choice.width:
            return []
        drafts, masks = self._trim(choice)
        known = [*pending, *self.drafts[:drafts]]
        rows = [self._clean_row(place, known) for place in range(len(known))]
        outcomes = range(drafts + 1) if choice.layout == "outcomes" else [drafts]
        for accepted in outcomes:
            first = len(rows)
            rows += [self._mask_row(first, j, accepted, masks) for j in range(masks)]
        return rows

    def _trim(self, choice: Choice) -> tuple[int, int]:
        """Drafts and mask rows a block: fewer drafts first, then fewer masks, until all fit."""
        left = self.request.limit - len(self.tokens)

        def fits(drafts: int, masks: int) -> bool:
            blocks = drafts + 1 if choice.layout == "outcomes" else 1
            return len(self.pending) + drafts + blocks * masks <= choice.width

        drafts, masks = min(len(self.drafts), choice.most_drafts), choice.masks
        # Each draft may become a token, and the target behind the last one is a token too.
        while drafts > 0 and (drafts + 1 > left or not fits(drafts, masks)):
            drafts -= 1
        # A mask row proposes a token behind that target.
        while masks > 0 and (drafts + 1 + masks > left or not fits(drafts, masks)):
            masks -= 1
        if self.request.bidirectional and masks < choice.masks:
            masks = 0
        return drafts, masks

    def _clean_row(self, place: int, known: Sequence[int]) -> Row:
        return Row(
            "pending" if place < len(self.pending) else "draft",
            known[place],
            self.materialised + place,
            frozenset(range(place + 1)),
            (*self.tokens[: self.materialised], *known[: place + 1]),
            place >= len(self.pending) - 1,
        )

    def _mask_row(self, first: int, j: int, accepted: int, masks: int) -> Row:
        clean = range(len(self.pending) + accepted)
        block = range(first, first + (masks if self.request.bidirectional else j + 1))
        known = (*self.tokens, *self.drafts[:accepted])
        return Row("mask", None, len(known) + j, frozenset([*clean, *block]), known, True)

    def take(self, rows: Sequence[Row], answers: Sequence[Answer], choice: Choice) -> None:
        """Commit what the answers to `rows` say; chooses the next drafts."""
        if not rows:
            self.counts["idle"] += 1
            return
        self.counts["forwards"] += 1
        drafts = [row.token for row in rows if row.kind == "draft"]
        said = answers[len(self.pending) - 1 :]
        accepted = self._count_right(drafts, said)
        self.drafts = []
        kinds = ["draft"] * accepted + ["target"]
        for answer, kind in zip(said[: accepted + 1], kinds, strict=True):
            if answer.token < 0:
                self.finish = "broken"
                return
            self._commit(answer, kind)
            self.materialised = len(self.tokens) - 1
            if self.finish:
                break
        masks = sum(row.kind == "mask" for row in rows)
        behind = said[len(drafts) + 1 :]
        if choice.layout == "outcomes":
            masks //= len(drafts) + 1
            self._go_on(behind[accepted * masks :][:masks], choice)
        elif accepted == len(drafts):
            self._go_on(behind, choice)

    def _count_right(self, drafts: Sequence[int | None], said: Sequence[Answer]) -> int:
        for j, draft in enumerate(drafts):
            self.counts["evaluated", j] += 1
            if said[j].token != draft:
                return j
            self.counts["accepted", j] += 1
        return len(drafts)

    def _commit(self, answer: Answer, kind: str) -> None:
        self.tokens.append(answer.token)
        self.committed.append(Committed(answer.token, kind, answer.logprob))
        self.counts[kind] += 1
        if answer.token in self.request.stops:
            self.finish = "stop"
        elif len(self.tokens) == self.request.limit:
            self.finish = "length"

    def _go_on(self, block: Sequence[Answer], choice: Choice) -> None:
        """What a valid run of mask rows gives."""
        request = self.request
        if self.finish or not block:
            return
        chain = _leading(block, request.threshold, request.stops)
        run = _leading(block, request.draft_threshold, request.stops)
        if run < len(block) and _sure(block[run], request.draft_threshold):
            run += 1  # An end token may well be a draft: then it is the last.
        for name, count in ("offered", len(block)), ("chained", chain), ("proposed", run):
            self.counts.update((name, j) for j in range(count))
        chain = min(chain, choice.most_chain)
        if request.mode == "confidence" or (
            request.mode == "hybrid" and chain >= request.min_chain
        ):
            for answer in block[:chain]:
                self._commit(answer, "unverified")
        elif request.mode in ("speculative", "hybrid"):
            left = request.limit - len(self.tokens)
            self.drafts = [answer.token for answer in block[:run]]
            del self.drafts[min(choice.most_drafts, left - 1) :]


def _sure(answer: Answer, threshold: float) -> bool:
    return answer.token >= 0 and np.float32(answer.confidence) >= np.float32(threshold)


def _leading(block: Sequence[Answer], threshold: float, stops: frozenset[int]) -> int:
    """Leading sure answers in front of the first end token."""
    for count, answer in enumerate(block):
        if not _sure(answer, threshold) or answer.token in stops:
            return count
    return len(block)


def greedy(logits: np.ndarray, known: Sequence[int], penalty: float) -> Answer:
    """The answer of one row of logits `(V,)` behind the tokens `known`."""
    z = [float(value) for value in logits]
    for token in set(known) if penalty != 1 else ():
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    if any(math.isnan(value) for value in z):
        return Answer(-1, 0.0, 0.0)
    top = max(z)
    log_total = math.log(math.fsum(math.exp(value - top) for value in z))
    return Answer(z.index(top), math.exp(-log_total), -log_total)
