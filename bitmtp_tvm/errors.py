"""Faults that a user can mend, each one sentence."""


class BitMTPError(Exception):
    """A fault outside this package: its text is one sentence, what is wrong and what to do."""

    exit_code = 1


class UsageError(BitMTPError):
    """A command line or argument that cannot be served."""

    exit_code = 2
