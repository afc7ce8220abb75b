"""Reads generations over the twin session, and holds every token against the contract."""

import math
from collections.abc import Collection, Sequence

from fake_model import FakeModel, hashed, right, right_but_unsure, wrong, wrong_at
from twin_session import CHEAP_ROWS, TwinSession, mtp_of

from bitmtp_tvm.decoder import Decoder, TokenStream
from bitmtp_tvm.modes import resolve
from bitmtp_tvm.sampling import SamplingOptions
from bitmtp_tvm.stopping import StopCondition
from relax_models.state import Kind

PROMPT = [5, 3, 1, 8]
EXACT = ("ar", "speculative")
QUALITIES = {
    "right": right,
    "wrong": wrong,
    "unsure": right_but_unsure,
    "last wrong": wrong_at([7]),
    "first wrong": wrong_at([0]),
    "random": hashed(5, 0.8),
}


def stop(max_new_tokens: int = 8, context: int = 64, eos: Collection[int] = ()) -> StopCondition:
    return StopCondition(frozenset(eos), max_new_tokens, context)


def decoder_of(model: FakeModel | None = None, **session) -> Decoder:
    return Decoder(TwinSession(model, **session), CHEAP_ROWS)


def ask(
    decoder: Decoder,
    prompt: Sequence[int] = PROMPT,
    condition: StopCondition | None = None,
    mode: str = "ar",
    sampling: SamplingOptions | None = None,
    **options,
) -> TokenStream:
    """Start a generation; `options` are those of `resolve`."""
    model, widths = decoder.session.model, decoder.session.widths
    options = resolve(mtp_of(model), widths, mode=mode, **options)
    return decoder.generate(prompt, condition or stop(), options, sampling)


def follow(decoder: Decoder, stream: TokenStream, most: float = math.inf) -> list[int]:
    """Read up to `most` tokens; after each, the accepted-prefix contract holds."""
    model, stats, prompt = decoder.session.model, stream.statistics, list(decoder.tokens)
    delivered, kinds, b = [], dict(stats.kinds), decoder.b
    while len(delivered) < most and (token := next(stream, None)) is not None:
        delivered.append(token)
        # 1: what was delivered is the committed prefix, and nothing is reported before it is.
        assert decoder.tokens == prompt + delivered
        assert stats.new_tokens == len(stream.logprobs) == len(delivered)
        # 2, 3: the cache is that of a causal forward, and the boundary only rises.
        assert b <= decoder.b < decoder.n
        b = decoder.b
        assert model.holds(decoder.tokens[:b])
        # Every verified token is the model's own choice behind what stands before it.
        new = [kind for kind in Kind if stats.kinds[kind] > kinds.get(kind, 0)]
        if new != [Kind.UNVERIFIED] and decoder.session.greedy:
            assert [token] == model.continuation(decoder.tokens[:-1], 1)
        kinds = dict(stats.kinds)
    if len(delivered) < most:
        assert decoder.session.under_way == 0 and stream.finish_reason
    return delivered


def check_counts(stream: TokenStream) -> None:
    """Of a generation that the device ended."""
    stats = stream.statistics
    assert sum(stats.kinds.values()) == stats.new_tokens
    assert sum(stats.steps.values()) == stats.forwards + stats.idle_steps
    assert sum(stats.accepted) >= stats.kinds[Kind.DRAFT]
    assert all(a <= e for a, e in zip(stats.accepted, stats.evaluated, strict=True))
    assert 0 not in stats.evaluated
    assert 0 <= stats.host_gap_seconds <= stats.decode_seconds
