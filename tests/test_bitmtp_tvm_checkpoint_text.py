"""Chat templates and special tokens of Hugging Face directories."""

import json
import shutil

import pytest
from bitnet_checkpoint import DEMO
from transformers import PreTrainedTokenizerFast

from bitmtp_tvm.chat import ChatTemplate
from bitmtp_tvm.checkpoint import open_checkpoint
from bitmtp_tvm.compile import tokenizer_info, write_text_files
from bitmtp_tvm.errors import BitMTPError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
)
OPTIONS = {
    "bos_token": {"content": "<|bos|>", "lstrip": False},
    "eos_token": "<|eos|>",
    "pad_token": None,
    "add_bos_token": True,
    "model_max_length": 10,
}


@pytest.fixture
def demo(tmp_path):
    """The demo's directory, its weights only linked."""
    folder = tmp_path / "demo"
    folder.mkdir()
    for path in DEMO.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            shutil.copyfile(path, folder / path.name)
    return folder


def write(folder, name, values):
    (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))


def test_the_demo_has_no_template(demo, tmp_path):
    checkpoint = open_checkpoint(demo)
    assert checkpoint.chat_template is None
    assert checkpoint.special_tokens == {"bos_token": "<|bos|>"}
    folder = tmp_path / "artifact"
    folder.mkdir()
    write_text_files(checkpoint, folder)
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    assert (folder / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    info = tokenizer_info(checkpoint)
    assert (info.file, info.chat_template) == ("tokenizer.json", None)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ({"chat_template": TEMPLATE}, None),
        ({"chat_template": "other"}, "chat_template.jinja"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "other"},
                    {"name": "default", "template": TEMPLATE},
                ]
            },
            None,
        ),
    ],
)
def test_the_places_of_a_template(demo, tmp_path, stored, name):
    write(demo, "tokenizer_config.json", OPTIONS | stored)
    if name:
        write(demo, name, TEMPLATE)
    checkpoint = open_checkpoint(demo)
    assert checkpoint.chat_template == TEMPLATE
    assert checkpoint.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    info = tokenizer_info(checkpoint)
    assert info.chat_template == "chat_template.jinja"
    folder = tmp_path / "artifact"
    folder.mkdir()
    write_text_files(checkpoint, folder)
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE


def test_the_prompt_is_the_one_of_transformers(demo):
    options = OPTIONS | {"chat_template": TEMPLATE, "bos_token": "<|bos|>"}
    write(demo, "tokenizer_config.json", options)
    checkpoint = open_checkpoint(demo)
    messages = [{"role": "user", "content": "hi <é>"}, {"role": "assistant", "content": "x"}]
    theirs = PreTrainedTokenizerFast.from_pretrained(demo).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ours = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens, "x").render(messages)
    assert ours == theirs and ours.startswith("<|bos|>user: hi")


def test_the_special_tokens_map(demo):
    write(demo, "special_tokens_map.json", {"unk_token": {"content": "<|mask|>"}, "eos_token": "x"})
    write(demo, "tokenizer_config.json", OPTIONS)
    assert open_checkpoint(demo).special_tokens == {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "unk_token": "<|mask|>",
    }


@pytest.mark.parametrize("template", [3, {"default": "x"}, [{"name": "default", "template": 1}]])
def test_a_template_that_is_no_text(demo, template):
    write(demo, "tokenizer_config.json", {"chat_template": template})
    with pytest.raises(BitMTPError, match="chat_template"):
        open_checkpoint(demo)
