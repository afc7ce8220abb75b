"""Faults that a user can mend, each one sentence."""


class BitMTPError(Exception):
    """A fault outside this package: its text is one sentence, what is wrong and what to do."""

    exit_code = 1


class UsageError(BitMTPError):
    """A command line or argument that cannot be served."""

    exit_code = 2


def shown(value: object) -> str:
    """A value out of a file as a message shows it: short, whatever it is, and on one line."""
    if isinstance(value, list) and len(value) > 8:
        return f"a list of {len(value)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:76]}…"
