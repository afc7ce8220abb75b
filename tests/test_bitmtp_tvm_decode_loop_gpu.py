"""The decode loop of the demo on a GPU, as CUDA graphs and without.

`--artifact DIR` names the demo, compiled for the device at hand; without it one is compiled here.
"""

from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from loop_properties import LIMIT, PROMPTS, PYTHON, LoopProperties, Model, orders
from numpy.testing import assert_array_equal

from bitmtp_tvm.sampling import SamplingOptions
from relax_models.state import Layout, Word

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    folder = request.config.getoption("--artifact")
    if folder is None:
        from bitmtp_tvm.compile import CompileOptions, compile_model
        from bitmtp_tvm.device import read_device
        from bitmtp_tvm.targets import TARGETS

        capability = read_device().compute_capability
        target = next(t.name for t in TARGETS.values() if t.compute_capability == capability)
        folder = tmp_path_factory.mktemp("demo") / "artifact"
        compile_model(CompileOptions(target, output=folder))
    return Path(folder)


@pytest.fixture(scope="module")
def models(directory):
    """With graphs, and without."""
    return {graph: Model(directory, [*PROMPTS, PYTHON], graph) for graph in (True, False)}


@pytest.fixture(params=[True, False], ids=["graph", "launches"])
def model(request, models):
    return models[request.param]


class TestLoop(LoopProperties):
    pass


@pytest.mark.parametrize("mode", ["ar", "speculative", "hybrid", "confidence"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_graph_does_what_its_kernels_do(models, mode, layout, temperature):
    """Tokens, states and caches are the same, for any order of buckets."""
    masks = 0 if mode == "ar" else 4
    for seed, prompt in enumerate(models[True].prompts):
        found = []
        for model in models.values():
            sampling = SamplingOptions(temperature=temperature, seed=3)
            state = model.state(prompt, model.options(mode), layout, masks, sampling)
            tokens, last = model.run(prompt, state, orders(model.widths, seed))
            found.append((tokens, last, model.caches(int(last[Word.BOUNDARY]))))
        (tokens, last, caches), (expected, last_of_kernels, caches_of_kernels) = found
        assert tokens == expected
        assert_array_equal(last, last_of_kernels)
        assert_array_equal(caches, caches_of_kernels)


def test_graphs_outlive_long_prefills_and_wide_steps(models):
    """A wide step, a narrow one, a prefill through everything, and the first one once more."""
    model = models[True]
    options = model.options("speculative", draft_threshold=1e-6)
    rng = np.random.default_rng(5)
    expected = [model.plain(prompt) for prompt in model.prompts]
    for _ in range(3):
        for prompt, tokens in zip(model.prompts, expected, strict=True):
            state = model.state(prompt, options, Layout.CHAIN, 4)
            assert model.run(prompt, state, cycle([64, 16, 8]))[0] == tokens
            noise = rng.integers(0, model.session.vocab_size, model.session.context).tolist()
            model.session.prefill(noise, 0)
            model.session.decode(noise[:64], range(64), LIMIT, None, range(64))
