"""Rules of the cuda target."""

RULES: dict = {}
