"""A GGUF file compiled for this machine's processor, and spoken to."""

import json
import shutil

import gguf_models
import pytest

from bitmtp_tvm import generate as command
from bitmtp_tvm.artifact import open_artifact
from bitmtp_tvm.checkpoint import open_checkpoint
from bitmtp_tvm.compile import CompileOptions, compile_model
from bitmtp_tvm.engine import Engine
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.reference.model import ReferenceModel

MESSAGES = [{"role": "user", "content": "the quick"}]


def compiled(folder, file, name):
    path = file.write(folder / f"{name}.gguf")
    output = folder / name
    compile_model(CompileOptions("cpu", str(path), output=output, widths=(1,), context=64))
    return path, output


@pytest.fixture(scope="module")
def bitnet(tmp_path_factory):
    """The GGUF file, and the artifact made of it."""
    file = gguf_models.bitnet("I2_S", blocks=1)[0]
    return compiled(tmp_path_factory.mktemp("bitnet"), file, "tiny-i2_s")


def twin_tokens(path, prompt, count):
    """The tokens that the numpy twin of the checkpoint chooses after `prompt`."""
    model = ReferenceModel.from_checkpoint(open_checkpoint(path), 64)
    cache, tokens = model.new_cache(64, half=True), list(prompt)
    logits = model.forward(tokens, range(len(tokens)), 0, None, cache)
    for _ in range(count):
        tokens.append(int(logits[-1].argmax()))
        place = len(tokens) - 1
        logits = model.forward(tokens[-1:], [place], place, None, cache)
    return tokens[len(prompt) :]


def test_the_artifact_holds_tokenizer_and_template(bitnet):
    path, output = bitnet
    artifact = open_artifact(output)
    checkpoint = open_checkpoint(path)
    assert artifact.tokenizer.read_bytes() == checkpoint.tokenizer_json()
    assert artifact.chat_template.read_bytes().decode() == gguf_models.TEMPLATE
    info = artifact.manifest.tokenizer
    assert (info.file, info.chat_template) == ("tokenizer.json", "chat_template.jinja")
    assert info.eos_token_ids == checkpoint.eos_token_ids
    assert info.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert artifact.manifest.model == "tiny-i2_s"
    assert artifact.manifest.config["quantization"] == "gguf I2_S"


def test_it_answers_as_the_numpy_twin_does(bitnet):
    path, output = bitnet
    engine = Engine(output)
    prompt = engine.encode("the quick brown fox")
    result = engine.generate(prompt, max_new_tokens=12).result()
    expected = twin_tokens(path, prompt, len(result.token_ids))
    assert list(result.token_ids) == expected


def test_a_message_goes_through_the_template(bitnet, capsys):
    engine = Engine(bitnet[1])
    text = "<|im_start|>user\nthe quick<|im_end|>\n<|im_start|>assistant\n"
    ids = gguf_models.trained().encode(text).ids
    assert engine.encode_chat(MESSAGES) == engine.encode_chat("the quick") == ids
    answer = engine.chat(MESSAGES, max_new_tokens=6).result()
    assert answer.token_ids == engine.generate(ids, max_new_tokens=6).result().token_ids
    arguments = ["--artifact", str(bitnet[1]), "--max-new-tokens", "6", "--json"]
    assert command.main([*arguments, "--chat", "--prompt", "the quick"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["token_ids"] == list(answer.token_ids) and shown["text"] == answer.text
    assert shown["stats"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("kind", ["Q1_0", "Q2_0"])
def test_a_bonsai_answers_as_the_numpy_twin_does(tmp_path, kind):
    file = gguf_models.qwen3(kind, blocks=1, tied=kind == "Q1_0")[0]
    path, output = compiled(tmp_path, file, "tiny")
    engine = Engine(output)
    prompt = engine.encode("the quick brown fox")
    result = engine.generate(prompt, max_new_tokens=12).result()
    assert list(result.token_ids) == twin_tokens(path, prompt, len(result.token_ids))


def test_a_missing_template_file_is_named(bitnet, tmp_path):
    copy = shutil.copytree(bitnet[1], tmp_path / "copy")
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(BitMTPError, match=r"chat_template\.jinja is missing"):
        open_artifact(copy)
