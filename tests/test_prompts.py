"""A prompt's ids: what a tokenizer adds stands there once; contents are texts or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from radixkv.engine.loading import find_eos_token_ids
from radixkv.text import encode_prompt
from radixkv.text.chats import render_chat

SPECIALS = {"<s>": 0, "</s>": 1, "[CLS]": 2, "[SEP]": 3, "<en>": 4}
AROUND = {
    "beginning": ("<s> $A", ["<s>"], []),
    "beginning and end": ("<s> $A </s>", ["<s>"], ["</s>"]),
    "end": ("$A </s>", [], ["</s>"]),
    "class": ("[CLS] $A [SEP]", ["[CLS]"], ["[SEP]"]),
    "two": ("<s> <en> $A </s>", ["<s>", "<en>"], ["</s>"]),
    "nothing": ("$A", [], []),
}


def tokenizer_of(template: str) -> Any:
    vocab = {s: 5 + i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab | SPECIALS, []))
    backend.add_special_tokens(list(SPECIALS))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(SPECIALS.items())
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {name: tokenizer_of(template) for name, (template, _, _) in AROUND.items()}


@pytest.mark.parametrize("name", AROUND)
@settings(max_examples=60)
@given(middle=st.lists(st.sampled_from(["a", " ", "b", *SPECIALS]), min_size=1, max_size=5))
def test_what_a_tokenizer_adds_is_not_doubled(name: str, middle: list[str]) -> None:
    tokenizer, (_, before, after) = TOKENIZERS[name], AROUND[name]
    text = "".join(middle)
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    head = [] if before and plain[0] == SPECIALS[before[0]] else [SPECIALS[s] for s in before]
    tail = [] if after and plain[-1] == SPECIALS[after[-1]] else [SPECIALS[s] for s in after]
    assert encode_prompt(tokenizer, text, vocab_size=999) == [*head, *plain, *tail]


class Source:
    def __init__(self, eos_token_id: Any, text_config: Any = None) -> None:
        self.eos_token_id = eos_token_id
        self.text_config = text_config or self

    def get_text_config(self) -> Any:
        return self.text_config


class Model:
    def __init__(self, config: Any, generation_config: Any = None) -> None:
        self.config, self.generation_config = config, generation_config


@pytest.mark.parametrize(
    ("model", "tokenizer", "expected"),
    [
        (Model(Source(None)), None, set()),
        (Model(Source(2)), None, {2}),
        (Model(Source(2), Source([5, 6])), Source(7), {5, 6, 7}),
        (Model(Source(2), Source(torch.tensor([5]))), Source(5), {5}),
        (Model(Source(None), Source(None)), Source(7), {7}),
        (Model(Source(None, Source([3]))), Source(None), {3}),
        (Model(Source(99), Source((-1, 4))), Source(10), {4}),
    ],
)
def test_end_tokens_are_the_models_and_the_tokenizers(
    model: Any, tokenizer: Any, expected: set[int]
) -> None:
    assert find_eos_token_ids(model, tokenizer, vocab_size=10) == expected


def rendered(template: str, chat: list[Any]) -> str:
    tokenizer = tokenizer_of("$A")
    tokenizer.chat_template = template
    return str(render_chat(tokenizer, chat, "prompt", tokenize=False))


PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"
BOTH = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"


def turns(user: str, system: str) -> str:
    return (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'system' %}"
        + system
        + "{% else %}"
        + user
        + "{% endif %}{% endfor %}"
    )


@pytest.mark.parametrize("user", ["{{ m.content }}", "{{ m.content | upper }}", PARTS, BOTH])
@pytest.mark.parametrize("system", ["{{ m.content }}", PARTS, BOTH])
@pytest.mark.parametrize("content", ["AB", ["A", {"type": "text", "text": "B"}]])
def test_each_role_gets_its_content_in_the_form_that_its_template_shows(
    user: str, system: str, content: Any
) -> None:
    roles = ["system", "user", "assistant", "tool", "developer", "user"]
    chat = [{"role": role, "content": content} for role in roles]
    shown = rendered(turns(user, system), chat)
    assert shown == "".join(f"[{role}]AB" for role in roles)


def test_a_message_is_not_changed_by_being_rendered() -> None:
    part = {"type": "text", "text": "A"}
    chat = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ]
    kept = [dict(message) for message in chat]
    assert rendered("{% for m in messages %}{{ m.content + '' }}{% endfor %}", chat) == "A"
    assert chat == kept
    assert chat[0]["content"] == [part]


def test_a_refusal_names_the_templates_own_reason() -> None:
    chat = [{"role": "user", "content": "A"}, {"role": "assistant", "content": None}]
    with pytest.raises(ValueError, match=r"prompt: .*never so"):
        rendered("{{ raise_exception('never so') }}", chat)
    assert rendered("{% for m in messages %}{{ m.content }}.{% endfor %}", chat) == "A.."


def test_fields_beside_the_content_reach_the_template() -> None:
    message = {"role": "assistant", "reasoning": "why", "tool_calls": [{"x": [1]}], "name": "n"}
    shown = "{% for m in messages %}{{ m.reasoning }}{{ m.tool_calls[0].x[0] }}{{ m.name }}"
    assert rendered(shown + "{% endfor %}", [message]) == "why1n"
