"""Words of the rules that choose tokens, the same on every target.

The helpers run while a template is parsed: each takes and returns expressions.
"""

from dataclasses import dataclass, fields
from typing import Any

from tvm.script import tirx as T

from schedules.workload import Workload

ROUNDS = 10
GALLOPS = 8
"""Steps of doubled length from the maximum down, before a search for a threshold halves."""

REACH = 16.7
"""More than the noise can be: -log(-log(1 - 2^-24)) is 16.64."""


@dataclass(frozen=True)
class Words:
    """Where the state keeps what a rule reads, as relax_models.choose_ops stamps it."""

    temperature: int
    top_k: int
    top_p: int
    min_p: int
    penalty: int
    seed_low: int
    seed_high: int
    row_pending: int
    row_drafts: int


@dataclass(frozen=True, eq=False)
class Row:
    """What the macros need of a row: buffers of the operation, the token's position, the row, its
    maximum and 1 / temperature, both `(1,)`; on cuda the thread too, and shared `(WARP,)` int32 and
    float32."""

    logits: Any
    seen: Any
    state: Any
    top: Any
    position: Any
    row: Any
    peak: Any
    inverse: Any
    thread: Any = None
    ids: Any = None
    values: Any = None


def words_of(work: Workload) -> Words:
    """The words in the stamp of `softmax_parts` or `choose`."""
    return Words(**{f.name: work.settings[f"word_{f.name}"] for f in fields(Words)})


def setting(state, word: int):
    """A float of the state."""
    return T.reinterpret("float32", state[word])


def penalty_factor(value, state, words: Words):
    """What the logit of a token that stands in the sequence is multiplied by."""
    penalty = setting(state, words.penalty)
    return T.Select(value > T.float32(0), T.float32(1) / penalty, penalty)


def is_broken(z):
    """NaN or +inf, asked of the bits."""
    bits = T.reinterpret("uint32", z)
    beyond = T.bitwise_and(bits, T.uint32(0x7FFFFFFF)) >= T.uint32(0x7F800000)
    return T.And(beyond, bits != T.uint32(0xFF800000))


def key_of(value):
    """An int32 that orders like the float32 it comes from."""
    bits = T.reinterpret("int32", value)
    return T.Select(bits >= 0, bits, T.bitwise_xor(bits, 0x7FFFFFFF))


def value_of(key):
    """The float32 of a key."""
    return T.reinterpret("float32", T.Select(key >= 0, key, T.bitwise_xor(key, 0x7FFFFFFF)))


def between(low, high):
    """The middle of two int32, whose sum may not fit one."""
    half = T.shift_right(T.bitwise_xor(low, high), 1)
    return T.bitwise_and(low, high) + half


def uniform(bits):
    """A float32 in (0, 1) from 23 random bits: an odd multiple of 2^-24, exactly."""
    whole = T.Cast("float32", T.shift_right(bits, T.uint32(9)))
    return (whole + T.float32(0.5)) * T.float32(2**-23)


def _high(product):
    return T.Cast("uint32", T.shift_right(product, T.uint64(32)))


@T.macro
def philox(words, keys, product, state, at, block, position):
    """words (4,) uint32: Philox4x32-10 of the counter (block, position, 0, 0) under the seed.

    keys `(2,)` uint32 and product `(2,)` uint64 are scratch; at: the Words.
    """
    words[0] = T.Cast("uint32", block)
    words[1] = T.reinterpret("uint32", position)
    words[2] = T.uint32(0)
    words[3] = T.uint32(0)
    keys[0] = T.reinterpret("uint32", state[at.seed_low])
    keys[1] = T.reinterpret("uint32", state[at.seed_high])
    for _ in T.unroll(ROUNDS):
        product[0] = T.Cast("uint64", words[0]) * T.uint64(0xD2511F53)
        product[1] = T.Cast("uint64", words[2]) * T.uint64(0xCD9E8D57)
        words[0] = T.bitwise_xor(T.bitwise_xor(_high(product[1]), words[1]), keys[0])
        words[1] = T.Cast("uint32", product[1])
        words[2] = T.bitwise_xor(T.bitwise_xor(_high(product[0]), words[3]), keys[1])
        words[3] = T.Cast("uint32", product[0])
        keys[0] = keys[0] + T.uint32(0x9E3779B9)
        keys[1] = keys[1] + T.uint32(0xBB67AE85)


def wanted(state, words: Words, stage):
    """Tokens that stage 0 (top_k) or 1 (top_p) has to keep at least."""
    return T.Select(stage == 0, state[words.top_k], 0)


def share(state, words: Words, stage):
    """The part of the mass that stage 0 (top_k) or 1 (top_p) has to keep at least."""
    return T.Select(stage == 0, T.float32(0), setting(state, words.top_p))


def is_active(state, words: Words, stage, vocab_size: int):
    """Whether the request asks for the filter of stage 0 (top_k) or 1 (top_p)."""
    top_k = T.And(state[words.top_k] > 0, state[words.top_k] < vocab_size)
    return T.Select(stage == 0, top_k, setting(state, words.top_p) < T.float32(1))


# A search for the largest threshold at which enough remains. search (6,) int32: a key that is
# enough, a key that is not, tokens from each of them up, steps made, the key to try; distance (1,)
# float32: length of the next step.
ENOUGH, TOO_MUCH, COUNT, ABOVE, STEPS, TRY = range(6)


@T.macro
def start_search(search, distance, least, peak, step):
    """Begin with the threshold `least`, at which everything remains that is left."""
    search[ENOUGH] = key_of(least)
    search[TOO_MUCH] = key_of(peak) + 1
    search[COUNT] = 0x7FFFFFFF
    search[ABOVE] = 0
    search[STEPS] = -1
    distance[0] = step


def is_open(search, tokens):
    """Whether a token between the two keys is undecided, where `tokens` have to remain."""
    decided = T.Or(search[TOO_MUCH] - 1 <= search[ENOUGH], search[COUNT] - search[ABOVE] <= 1)
    return T.Not(T.Or(decided, search[COUNT] == tokens))


@T.macro
def next_threshold(search, distance, peak):
    """The key to try. First the start itself, for what there is. What a filter keeps is near the
    maximum as a rule, so that the next tries are there; then the rest is halved."""
    search[TRY] = between(search[ENOUGH], search[TOO_MUCH])
    if search[STEPS] < 0:
        search[TRY] = search[ENOUGH]
    elif search[STEPS] < GALLOPS:
        if key_of(peak - distance[0]) > search[ENOUGH]:
            search[TRY] = T.min(key_of(peak - distance[0]), search[TOO_MUCH] - 1)
        distance[0] = distance[0] * T.float32(2)
    search[STEPS] = search[STEPS] + 1


@T.macro
def narrow(search, count, enough):
    """Take in what a try gave: tokens from its key up, and whether they are enough."""
    if enough:
        search[ENOUGH] = search[TRY]
        search[COUNT] = count
        if search[STEPS] > 0:
            search[STEPS] = GALLOPS
    else:
        search[TOO_MUCH] = search[TRY]
        search[ABOVE] = count
