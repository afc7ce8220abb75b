"""The architectures that can be compiled, by the name that a checkpoint's config gives."""

from relax_models.bitnet import BitNet
from relax_models.bonsai import Bonsai

MODELS = {"bitnet": BitNet, "qwen3": Bonsai}
