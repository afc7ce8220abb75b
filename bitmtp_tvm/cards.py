"""A target's figures as schedules know them."""

from bitmtp_tvm.overlap import overlaps
from bitmtp_tvm.targets import Target
from schedules.space import Card


def card_of(target: Target) -> Card:
    """The `schedules.space.Card` that the tiles of a cuda target are chosen by; a processor has no
    tiles, and its figures are 0."""
    return Card(
        multiprocessors=target.multiprocessors,
        bandwidth_gbs=target.bandwidth_gbs,
        l2_bytes=target.l2_bytes,
        shared_bytes=target.shared_memory_per_block,
        registers=target.registers_per_sm,
        overlaps=target.kind == "cuda" and overlaps(target.arch),
    )
