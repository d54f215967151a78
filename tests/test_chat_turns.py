"""A chat built turn by turn in a branch has the template's ids, whatever the template does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from radixkv import Engine, EngineClosedError, KVConfig
from radixkv.text import begin_conversation, continue_conversation, encode_prompt
from radixkv.text.tool_calls import find_tool_calls

KV = KVConfig(dtype="model", page_size=4, capacity="4MiB")
SPECIALS = ["<|r|>", "<|end|>", "[INST]", "[/INST]"]
MERGES = [("y", "e"), ("ye", "s"), ("h", "i"), ("\n", "\n"), (".", ".")]

TEMPLATES = {
    "a line a turn": (
        "{% for m in messages %}<|r|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|r|>assistant\n{% endif %}"
    ),
    "stripped contents": (
        "<s>{% for m in messages %}<|r|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|r|>assistant\n\n{% endif %}"
    ),
    "thoughts dropped": (
        "{% for m in messages %}<|r|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|r|>assistant\n<think>\n{% endif %}"
    ),
    "brackets": (
        "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
    ),
    "text alone": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "the last turn otherwise": (
        "{% for m in messages %}<|r|>{{ m.role }}{% if loop.last %} now{% endif %}\n"
        "{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|r|>assistant\n{% endif %}"
    ),
}


def tokenizer_of(meta: str | None, template: str) -> Any:
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    letters = ["\u2581", *map(chr, range(10, 127))]
    for symbol in letters if meta else sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(symbol, len(vocab))
    merges = [tuple(s.replace("\n", "\n" if meta else "\u010a") for s in pair) for pair in MERGES]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    if meta == "strip":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    elif meta:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=meta, split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme=meta)
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=SPECIALS,
    )
    fast.chat_template = template
    return fast


TOKENIZERS = {
    (meta, name): tokenizer_of(meta, template)
    for meta, (name, template) in itertools.product(
        (None, "first", "always", "never", "strip"), TEMPLATES.items()
    )
}


def ids_of(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


said = st.lists(st.sampled_from(["y", "e", "s", " ", "\n", ".", "hi", "a</think>"]), max_size=6)
ends = st.sampled_from(["", "</s>", "<|end|>", "<|end|>\n"])


@pytest.mark.parametrize("key", TOKENIZERS, ids=str)
@settings(max_examples=15)
@given(turns=st.lists(st.tuples(said, ends, said), min_size=1, max_size=3))
def test_the_ids_are_the_templates_over_the_whole_chat(key: Any, turns: Any) -> None:
    """Whatever tokens an answer came in: here each of its characters is one."""
    tokenizer = TOKENIZERS[key]
    chat = [user("hi")]
    token_ids = encode_prompt(tokenizer, chat, vocab_size=999)
    conversation = begin_conversation(chat, token_ids)
    for answer, end, question in turns:
        closing = tokenizer.chat_template
        if end and end.strip() not in closing and end != "</s>":
            continue  # no token that ends a turn there: part of the text
        if end.endswith("\n") and "<|end|>\n" not in closing.replace("\\n", "\n"):
            continue
        content = "".join(answer)
        pieces = [letter for text in answer for letter in text]
        new = [
            token_id
            for i, letter in enumerate(pieces)
            for token_id in (
                [tokenizer.convert_tokens_to_ids("\u2581" if letter == " " else letter)]
                if key[0]
                else tokenizer(letter, add_special_tokens=False)["input_ids"]
            )
        ]
        new += tokenizer(end, add_special_tokens=False)["input_ids"] if end else []
        if not new and "alternate" in tokenizer.chat_template:
            continue  # nothing was said: refused, below
        token_ids, conversation = continue_conversation(
            tokenizer,
            token_ids + new,
            [user("".join(question))],
            conversation=conversation,
            ended=False,
            shows_special=True,
            eos_token_ids=[2],
            vocab_size=999,
        )
        chat += [assistant(content)] if new else []
        chat += [user("".join(question))]
        assert token_ids == ids_of(tokenizer, chat)


@pytest.fixture
def engine_of(tiny_model: Any) -> Any:
    opened: list[Engine] = []

    def make(name: str, meta: str | None = None, template: str | None = None) -> Engine:
        tokenizer = tokenizer_of(meta, template) if template else TOKENIZERS[meta, name]
        opened.append(Engine(tiny_model("llama"), tokenizer, kv=KV, backend="torch"))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


UNSAID = [1, 3, *range(200, 1000)]


@pytest.mark.parametrize("meta", [None, "first", "strip"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_generated_turns_and_what_follows_are_those_of_the_whole_chat(
    engine_of: Any, name: str, meta: str | None
) -> None:
    """Tokens that a random model draws, hence in no order that a tokenizer would make."""
    engine = engine_of(name, meta)
    chat = [user("hi")]
    with engine.open(chat) as branch:
        for turn in range(3):
            result = branch.generate(
                max_new_tokens=6, seed=turn, logit_bias=dict.fromkeys(UNSAID, -1e4)
            )
            chat += [assistant(result.text), user(f"so {turn}")]
            twin = branch.fork()[0]
            branch.append(chat[-1:])
            twin.append(chat[-1:])
            assert branch.token_ids == twin.token_ids == ids_of(engine.tokenizer, chat)
            twin.close()
        alone = engine.generate(chat, max_new_tokens=4, temperature=0, logprobs=2).samples[0]
        grown = branch.generate(max_new_tokens=4, temperature=0, logprobs=2).samples[0]
        assert grown.token_ids == alone.token_ids
        assert grown.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)
    engine.cache.check()


def test_a_branch_cut_back_to_an_earlier_turn_goes_on_from_there(engine_of: Any) -> None:
    engine = engine_of("a line a turn")
    tokenizer = engine.tokenizer
    with engine.open([user("hi")]) as branch:
        branch.append("yes")
        length = len(branch)
        branch.append([user("a")])
        branch.append("no")
        branch.append([user("b")])
        assert branch.token_ids == ids_of(
            tokenizer, [user("hi"), assistant("yes"), user("a"), assistant("no"), user("b")]
        )
        branch.truncate(length)
        branch.append("!")
        branch.append([user("c")])
        again = [user("hi"), assistant("yes!"), user("c")]
        assert branch.token_ids == ids_of(tokenizer, again)
        branch.truncate(5)
        held = list(branch.token_ids)
        with pytest.raises(ValueError, match="cut inside"):
            branch.append([user("d")])
        branch.append([7, 8, 9] * 20)
        with pytest.raises(ValueError, match="cut inside"):
            branch.append([user("d")])
        assert branch.token_ids[:5] == held
    with pytest.raises(EngineClosedError):
        branch.append([user("d")])


def test_messages_that_follow_at_once_need_no_empty_answer(engine_of: Any) -> None:
    engine = engine_of("a line a turn")
    with engine.open([{"role": "system", "content": "short"}]) as branch:
        branch.append([user("hi")])
        chat = [{"role": "system", "content": "short"}, user("hi")]
        assert branch.token_ids == ids_of(engine.tokenizer, chat)
        branch.append([assistant("yes"), user("and")])  # an answer that its owner gives
        chat += [assistant("yes"), user("and")]
        assert branch.token_ids == ids_of(engine.tokenizer, chat)


def test_an_answer_may_be_said_again_by_its_owner(engine_of: Any) -> None:
    engine = engine_of("a line a turn")
    with engine.open([user("hi")]) as branch:
        branch.append("yes ")
        branch.append([assistant("yes"), user("and")])
        chat = [user("hi"), assistant("yes"), user("and")]
        assert branch.token_ids == ids_of(engine.tokenizer, chat)
        branch.append("no")
        branch.append([assistant("other"), user("so")])  # something else: one more message
        chat += [assistant("no"), assistant("other"), user("so")]
        assert branch.token_ids == ids_of(engine.tokenizer, chat)


def test_what_the_template_refuses_leaves_the_branch_as_it_was(engine_of: Any) -> None:
    engine = engine_of("brackets")
    with engine.open([user("hi")]) as branch:
        with pytest.raises(ValueError, match="roles must alternate"):
            branch.append([user("so")])  # nobody has answered
        branch.append(" yes")
        held = list(branch.token_ids)
        with pytest.raises(ValueError, match="roles must alternate"):
            branch.append([assistant("again")])
        assert branch.token_ids == held
        branch.append([user("so")])
        assert branch.token_ids == ids_of(
            engine.tokenizer, [user("hi"), assistant(" yes"), user("so")]
        )


def test_messages_changed_after_they_were_given_change_nothing(engine_of: Any) -> None:
    engine = engine_of("a line a turn")
    chat = [user("hi")]
    more = [user("more")]
    with engine.open(chat) as branch:
        branch.append("yes")
        chat[0]["content"] = "else"
        branch.append(more)
        more[0]["content"] = "else"
        branch.append("no")
        branch.append([user("so")])
        whole = [user("hi"), assistant("yes"), user("more"), assistant("no"), user("so")]
        assert branch.token_ids == ids_of(engine.tokenizer, whole)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_inside_an_answer_stay_if_its_text_has_them(
    engine_of: Any, skip: bool
) -> None:
    engine = engine_of("a line a turn")
    script = engine.tokenizer("a[INST]b", add_special_tokens=False)["input_ids"]

    def follow(input_ids: Any, scores: Any) -> Any:
        forced = torch.full_like(scores, -1e9)
        forced[:, script[input_ids.shape[1] - length]] = 0
        return forced

    with engine.open([user("hi")]) as branch:
        branch.append("a[INST]b")
        branch.append([user("so")])
        whole = [user("hi"), assistant("a[INST]b"), user("so")]
        assert branch.token_ids == ids_of(engine.tokenizer, whole)
        length = len(branch)
        result = branch.generate(
            max_new_tokens=3, logits_processors=[follow], skip_special_tokens=skip
        )
        assert result.text == ("ab" if skip else "a[INST]b")
        (twin,) = branch.fork()
        branch.append([user("so")])
        twin.append([user("so")])
        whole += [assistant(result.text), user("so")]
        assert branch.token_ids == twin.token_ids == ids_of(engine.tokenizer, whole)
        twin.close()


# Calls

HERMES = (
    "{% for m in messages %}<|r|>{{ m.role }}\n"
    "{% if m.role == 'tool' and not (messages[loop.index0 - 1].tool_calls or "
    "messages[loop.index0 - 1].role == 'tool') %}{{ raise_exception('no call') }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|r|>assistant\n{% endif %}"
)
CALLS = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TWO = f'Let me see.\n{CALLS}\n<tool_call>\n{{"name": "g", "arguments": {{}}}}\n</tool_call>'


@pytest.mark.parametrize("text", [CALLS, TWO, CALLS.replace(": {", ":{"), "\n" + CALLS])
@pytest.mark.parametrize("checks", [True, False])
def test_the_calls_that_were_generated_stand_before_their_answers(
    engine_of: Any, text: str, checks: bool
) -> None:
    template = HERMES if checks else HERMES.replace("no call", "").replace("raise_exception", "str")
    template = template.replace("{{ str('') }}", "")
    engine = engine_of("hermes", template=template)
    tokenizer = engine.tokenizer
    rest, calls = find_tool_calls(text)
    answers = [
        {"role": "tool", "content": str(i), "tool_call_id": f"call_{i}"} for i in range(len(calls))
    ]
    with engine.open([user("hi")]) as branch:
        branch.append(text)
        branch.append(answers)
        told = {"role": "assistant", "content": rest, "tool_calls": calls}
        plain = text if not checks else None
        whole = ids_of(tokenizer, [user("hi"), told, *answers])
        if checks or text in (CALLS, TWO):
            assert branch.token_ids == whole
        else:
            assert plain is not None
            assert branch.token_ids == ids_of(tokenizer, [user("hi"), assistant(plain), *answers])
        branch.append("42")
        branch.append([user("so")])
        assert "42<|end|>\n<|r|>user\nso<|end|>" in tokenizer.decode(branch.token_ids)


def test_a_template_that_leaves_calls_out_has_them_as_text(engine_of: Any) -> None:
    engine = engine_of("a line a turn")
    answer = {"role": "tool", "content": "42", "tool_call_id": "1"}
    with engine.open([user("hi")]) as branch:
        branch.append(CALLS)
        branch.append([answer])
        whole = [user("hi"), assistant(CALLS), answer]
        assert branch.token_ids == ids_of(engine.tokenizer, whole)


F = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
G = {"type": "function", "function": {"name": "g", "arguments": {}}}


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (CALLS, "", [F]),
        (TWO, "Let me see.", [F, G]),
        ('{"name": "f", "parameters": {"x": 1}}', "", [F]),
        ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
         "", [F, G]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
         "", [F, G]),
        ('So.[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[ARGS]{}', "So.", [F, G]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [F]),
        ("f(x=1)", "f(x=1)", []),
        ("", "", []),
        ('{"name": 5}', '{"name": 5}', []),
        ('{"x": 1}', '{"x": 1}', []),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        (CALLS + "<tool_call>{}</tool_call>", CALLS + "<tool_call>{}</tool_call>", []),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    ],
)  # fmt: skip
def test_calls_are_found_in_every_format_or_the_text_is_left(
    text: str, rest: str, calls: list[Any]
) -> None:
    assert find_tool_calls(text) == (rest, calls)
