"""Progress bars on stderr, for a person only."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from bitmtp_tvm.cli import check_stopped

T = TypeVar("T")


def counted(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The items; a bar counts them on a terminal, and is gone when they are done."""
    hidden = None if sys.stderr else True
    bar = tqdm(items, what, total, leave=False, disable=hidden, file=sys.stderr)
    for item in bar:
        check_stopped()
        yield item
