"""How the lanes of a row trade two-bit codes, so that an mma sums over other columns of K."""

from tvm.script import tirx as T

from schedules.gpu.thread import across


def chosen(traded, kept, lane, distance: int):
    """The fields that the lane trades from `traded`, those that it keeps from `kept`."""
    low = 0x33333333 if distance == 1 else 0x0F0F0F0F
    mask = T.Select(T.bitwise_and(lane, distance) == 0, T.uint32(low), T.uint32(low ^ 0xFFFFFFFF))
    return T.bitwise_or(T.bitwise_and(kept, mask), T.bitwise_and(traded, T.bitwise_not(mask)))


def turned(direction: str, word, lane, distance: int):
    """`word` rotated so that traded fields come to the place of kept ones ("r"), or back ("l")."""
    amount = T.Select(T.bitwise_and(lane, distance) == 0, 2 * distance, 32 - 2 * distance)
    return T.call_pure_extern("uint32", f"__funnelshift_{direction}", word, word, amount)


@T.macro
def exchange(words, first, lane, distance):
    """Two words swap their two-bit fields with the lane at `distance` (1 or 2).

    The fields number f of a byte with f & distance == lane & distance stay, the others are traded
    for the other lane's: one word carries those of both.
    """
    sent = T.sblock_alloc_buffer((1,), "uint32", scope="local")
    sent[0] = chosen(words[first], turned("r", words[first + 1], lane, distance), lane, distance)
    sent[0] = across(sent[0], distance)
    words[first] = chosen(turned("l", sent[0], lane, distance), words[first], lane, distance)
    words[first + 1] = chosen(sent[0], words[first + 1], lane, distance)
