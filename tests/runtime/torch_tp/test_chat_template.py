"""Chat templates: the text transformers would make, refusals in one line, and no way out of the sandbox."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from runtime.torch_tp.chat_template import ChatTemplate, ChatTemplateError

CHATML = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if tools is defined and tools %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}{{- call.function.arguments | tojson }}{%- endfor %}
        {%- continue %}
    {%- endif %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
TRAINING = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }} {% endif %}{% endfor %}"
)
TURNS = [
    {"role": "user", "content": " What's <b>2 & 2</b>? "},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": 'And "你好"?'},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'c'", "parameters": {"z": 1, "a": [1, 2]}}}]
CALLS = [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"x": "<ü>"}}}], "content": None}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("source", [CHATML, LLAMA3, TRAINING], ids=["chatml", "llama3", "training"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_equals_transformers(source, add_generation_prompt):
    for messages, tools in ((TURNS, None), (TURNS, TOOLS), ([*TURNS, *CALLS] if source == LLAMA3 else TURNS, TOOLS)):
        got = ChatTemplate(source, TOKENS).render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        expected = render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, **TOKENS
        )[0][0]
        assert got == expected


def test_variables_reach_the_template():
    template = ChatTemplate("{{ 'yes' if enable_thinking else 'no' }}{{ strftime_now('%%') }}", TOKENS)
    assert template.render([], enable_thinking=True) == "yes%"
    assert template.render([]) == "no%"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate\nuser, assistant') }}", "roles must alternate user, assistant"),
        ("{{ messages[3].content.upper() }}", "refused the messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% for i in range(10**9) %}{% endfor %}", "too big"),
        ("{% include 'other' %}", "refused"),
    ],
)
def test_refusals_are_one_line(source, said):
    with pytest.raises(ChatTemplateError, match=said) as error:
        ChatTemplate(source, TOKENS).render([{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)


def test_a_damaged_template_is_refused_when_it_is_read():
    with pytest.raises(ChatTemplateError, match="chat template is damaged"):
        ChatTemplate("{% for message in messages %}", TOKENS)
