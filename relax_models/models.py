"""The architectures that can be compiled, by the name that a checkpoint's config gives."""

from relax_models.bitnet import FORMAT, BitNet

MODELS = {"bitnet": BitNet}

FORMAT_OF = {"bitnet": FORMAT}
"""Low-bit format of each architecture's linears: a key of `relax_models.formats.FORMATS`."""
