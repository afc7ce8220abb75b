"""Chat templates as transformers renders them."""

from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from bitmtp_tvm.chat import ChatTemplate, read_template
from bitmtp_tvm.errors import BitMTPError, UsageError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "  Is 1 < 2 & 'x'?\n"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>hm</think>\n\nb"},
    {"role": "user", "content": '漢字 "c"'},
]
# The constructions that published templates are made of.
TEMPLATES = {
    "headers": """{% set loop_messages = messages %}{% for message in loop_messages %}
    {% set content = '<|h|>' + message['role'] + '<|/h|>\n\n' + message['content'] | trim + '|' %}
    {% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}
{% endfor %}{% if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\n\n' }}{% endif %}""",
    "capitalised": "{{ bos_token }}{% for m in messages %}{{ m['role'] | capitalize + ': ' + "
    "m['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}"
    "{% endif %}",
    "namespace": """{%- if tools %}{{- tools | tojson }}{%- else %}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{%- endif %}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.found and message.role == 'user' and message.content is string %}
        {%- set ns.found = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {{- message.content.split('</think>')[-1].lstrip('\n') }}
    {%- elif loop.last or loop.index0 == ns.last %}[{{ message.content }}]
    {%- else %}{{- message.content.strip() | tojson }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined %}x{%- endif %}""",
    "loops": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};"
    "{% endfor %}",
    "macro": "{% macro show(m, n=2) %}{{ m.role }}:{{ m.content | upper }}{{ n }}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{{ show(m, n=1) }}{% endfor %}{{ messages | tojson }}"
    "{{ {'a': 1} | tojson(indent=2) }}{{ documents is none }}",
    "date": "{{ strftime_now('%Y') }}{{ messages[0]['content'] }}",
}


@pytest.mark.parametrize("messages", [USER, TALK], ids=["one", "talk"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers_renders_it(name, messages):
    (expected,), _ = render_jinja_template(
        [messages], chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS
    )
    assert ChatTemplate(TEMPLATES[name], TOKENS, "x").render(messages) == expected
    assert (
        messages[0]["content"] in expected
        or messages[0]["content"].strip() in expected
        or (name in ("loops", "macro"))
    )


def test_today():
    assert str(datetime.now().year) in ChatTemplate(TEMPLATES["date"], {}, "x").render(USER)


def test_what_a_template_refuses_is_said_in_its_words():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "chat.jinja")
    with pytest.raises(UsageError, match=r"chat\.jinja does not take .*: roles must alternate"):
        template.render(USER)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include 'other' %}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.upper() }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do(text):
    with pytest.raises(UsageError, match=r"^x does not take these messages"):
        ChatTemplate(text, {}, "x").render(USER)


def test_the_messages_stay_as_they_are():
    messages = [dict(message) for message in TALK]
    ChatTemplate(TEMPLATES["namespace"], TOKENS, "x").render(messages)
    assert messages == TALK


@pytest.mark.parametrize(
    "text", ["{% for m in messages %}", "{{", "{% nonsense %}", "{{ x | no }}"]
)
def test_a_damaged_template_is_found_when_it_is_used(text):
    template = ChatTemplate(text, {}, "chat.jinja")
    with pytest.raises(BitMTPError, match=r"chat\.jinja is not a readable chat template"):
        template.render(USER)


@pytest.mark.parametrize(
    "messages",
    [[], ["text"], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}], [None]],
)
def test_what_is_no_message(messages):
    with pytest.raises(UsageError, match="message"):
        ChatTemplate("x", {}, "x").render(messages)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(BitMTPError, match="none cannot be read"):
        read_template(tmp_path / "none", {})
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(BitMTPError, match="not valid UTF-8"):
        read_template(tmp_path / "bytes", {})
    (tmp_path / "good").write_bytes("a\r\n{{ bos_token }}é".encode())
    assert read_template(tmp_path / "good", TOKENS).render(USER) == "a\n<s>é"
