"""Text in, text out: the faults of the second collection, each with its right value."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from radixkv import BeamParams, Engine, KVConfig

KV = KVConfig(dtype="model", page_size=4, capacity="4MiB")
TURNS = (
    "{% for m in messages %}<|r|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|r|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]


def tok(
    merges: Any = (),
    *,
    bos: bool = False,
    eos: str = "</s>",
    template: str = TURNS,
    meta: str | None = None,
) -> Any:
    """Every character a token: byte-level, or with SentencePiece's mark where ``meta`` says."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    symbols = ["\u2581", *map(chr, range(10, 127))] if meta else None
    for symbol in symbols or sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(symbol, len(vocab))
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    if meta:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=meta, split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme=meta)
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=eos,
        additional_special_tokens=["<|r|>", "<|end|>"],
    )
    fast.chat_template = template
    return fast


def stripping(merges: Any = ()) -> Any:
    """As Llama 2 and Mistral: marks for spaces, and a decoder that takes one leading space."""
    tokenizer = tok(merges, meta="first")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def say(num_prompt: int, token_ids: list[int]) -> Any:
    """A logits processor: after a prompt of that many tokens say these, the last for ever."""

    def follow(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = min(input_ids.shape[1] - num_prompt, len(token_ids) - 1)
        forced = torch.full_like(scores, -1e9)
        forced[:, token_ids[at]] = 0
        return forced

    return follow


@pytest.fixture
def engine_of(tiny_model: Any) -> Any:
    opened: list[Engine] = []

    def make(tokenizer: Any, *, eos_token_id: Any = 2) -> Engine:
        model = tiny_model("llama", fresh=eos_token_id != 2)
        model.config.eos_token_id = model.generation_config.eos_token_id = eos_token_id
        opened.append(Engine(model, tokenizer, kv=KV, backend="torch"))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


def spoken(engine: Engine, text: str, *, specials: bool = True) -> list[int]:
    ids: list[int] = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def ids_of_chat(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    return list(rendered["input_ids"])


# T1


@pytest.mark.parametrize(
    ("stop", "said", "text"),
    [
        ("<|end|>", "hello<|end|>hello", "hello"),
        ("<|end|>\n", "hello<|end|>\nhello", "hello"),
        ("<|end|>\n", "a<|end|>b<|end|>\nc", "ab"),
        ("lo<|end|>", "hello<|end|>hello", "hel"),
        ("lo<|end|>h", "hello<|end|>hello", "hel"),
        ("<|end|><|r|>", "hi<|end|>x<|end|><|r|>", "hix"),
        ("<|r|>user", "one<|r|>use<|r|>user", "oneuse"),
        ("</s>", "hello</s>hello", "hello"),
        ("<s>", "hello<s>hello", "hello"),
    ],
)
def test_a_stop_string_that_holds_a_special_token_ends_the_text(
    engine_of: Any, stop: str, said: str, text: str
) -> None:
    engine = engine_of(tok())
    fields = {
        "max_new_tokens": len(spoken(engine, said)),
        "temperature": 0,
        "stop": ["never", stop],
        "logits_processors": [say(1, spoken(engine, said))],
    }
    (sample,) = engine.generate("x", **fields).samples
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (text, "stop", stop)
    deltas = list(engine.stream("x", **fields))
    assert "".join(delta.text for delta in deltas) == text
    assert deltas[-1].finish_reason == "stop"

    async def collect() -> str:
        return "".join([delta.text async for delta in engine.astream("x", **fields)])

    assert asyncio.run(collect()) == text


def test_special_tokens_that_end_nothing_are_left_out_as_ever(engine_of: Any) -> None:
    engine = engine_of(tok())
    said = spoken(engine, "hel<|end|>lo<|r|>!")
    fields = {"max_new_tokens": len(said), "temperature": 0, "logits_processors": [say(1, said)]}
    for stop, text, reason in (
        ((), "hello!", "length"),
        ("<|end|>!", "hello!", "length"),
        ("lo!", "hel", "stop"),  # on the text as it is shown
        ("<|end|>l!", "hello!", "length"),
        ("<|end|>lo!", "hello!", "length"),  # <|r|> stands between
    ):
        (sample,) = engine.generate("x", stop=stop, **fields).samples
        assert (sample.text, sample.finish_reason) == (text, reason)


# T2


@pytest.mark.parametrize(
    "template",
    [
        TURNS,
        TURNS.replace("{{ m['content'] }}", "{{ m.content + '' }}"),
        TURNS.replace("{{ m['content'] }}", "{{ m.content | trim }}"),
        TURNS.replace(
            "{{ m['content'] }}",
            "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}",
        ),
        TURNS.replace(
            "{{ m['content'] }}",
            "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
            "{{ c['text'] }}{% endfor %}{% endif %}",
        ),
    ],
)
@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "mill"}],
        [{"type": "text", "text": "mi"}, {"type": "text", "text": "ll"}],
        ["mi", "ll"],
        ({"type": "input_text", "text": "mill"},),
        "mill",
    ],
)
def test_the_texts_of_a_content_in_parts_are_joined(
    engine_of: Any, template: str, content: Any
) -> None:
    engine = engine_of(tok(template=template))
    request = engine.submit([{"role": "user", "content": content}], max_new_tokens=1)
    engine.abort(request)
    text = engine.tokenizer.decode(request.prompt_token_ids)
    assert text == "<|r|>user\nmill<|end|>\n<|r|>assistant\n"


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, "image_url"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
        ({"type": "image"}, "image"),
        ({"type": "text"}, "text"),
        ({"type": "text", "text": 5}, "text"),
        (5, "int"),
        (None, "NoneType"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_name(engine_of: Any, part: Any, kind: str) -> None:
    engine = engine_of(tok())
    chat = [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
    with pytest.raises(ValueError, match=rf"message 1.*part 1.*{kind}"):
        engine.generate(chat, max_new_tokens=1)


CALL = {"type": "function", "id": "123456789", "function": {"name": "f", "arguments": {"x": 1}}}
PRINTS_CALLS = (
    "{% for m in messages %}<|r|>{{ m['role'] }}\n{{ CONTENT }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|r|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("prints", ["m.content", "m.content + ''", "m['content'] | trim"])
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_calls_without_a_content_are_a_turn_with_an_empty_one(
    engine_of: Any, prints: str, content: dict[str, Any]
) -> None:
    engine = engine_of(tok(template=PRINTS_CALLS.replace("CONTENT", prints)))
    chat = [*CHAT, {"role": "assistant", "tool_calls": [CALL], **content}]
    request = engine.submit(chat, max_new_tokens=1)
    engine.abort(request)
    text = engine.tokenizer.decode(request.prompt_token_ids)
    call = '<call>{"name": "f", "arguments": {"x": 1}}</call>'
    assert text == f"<|r|>user\nhi<|end|>\n<|r|>assistant\n{call}<|end|>\n<|r|>assistant\n"
    with pytest.raises(ValueError, match=r"content.*position 0"):
        engine.generate([{"role": "user", "content": None}], max_new_tokens=1)


# T3


MORE = [{"role": "user", "content": "more"}]


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("yes<|end|>", {"stop_token_ids": ["<|end|>"]}),
        ("yes<|end|>", {"stop": "<|end|>"}),
        ("yes<|end|>\n", {"stop": "<|end|>\n"}),
        ("yes</s>", {}),
        ("yes", {}),
        ("yes<|end|>", {}),
        ("yes<|end|>\n", {}),
        ("yes.", {"stop_token_ids": ["."]}),
    ],
)
@pytest.mark.parametrize("as_chat", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_a_chat_built_turn_by_turn_has_the_ids_of_the_template_over_it(
    engine_of: Any, said: str, fields: dict[str, Any], as_chat: bool, skip: bool
) -> None:
    tokenizer = tok()
    engine = engine_of(tokenizer)
    said_ids = spoken(engine, said)
    fields = dict(fields)
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = tokenizer.convert_tokens_to_ids(fields["stop_token_ids"])
    with engine.open(CHAT if as_chat else ids_of_chat(tokenizer, CHAT)) as branch:
        answers = []
        for _ in range(2):
            result = branch.generate(
                max_new_tokens=len(said_ids),
                temperature=0,
                skip_special_tokens=skip,
                logits_processors=[say(len(branch), said_ids)],
                **fields,
            )
            answer = [{"role": "assistant", "content": "yes"}]
            if skip:
                assert result.text.strip("\n") == "yes"
            branch.append(MORE)
            answers += [*answer, *MORE]
            assert branch.token_ids == ids_of_chat(tokenizer, [*CHAT, *answers])


def test_the_end_of_a_turn_stands_there_once(engine_of: Any) -> None:
    tokenizer = tok()
    engine = engine_of(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    with engine.open(CHAT) as branch:
        fields = {"stop_token_ids": [end], "max_new_tokens": 9, "temperature": 0}
        branch.generate(
            logits_processors=[say(len(branch), [*spoken(engine, "yes"), end])], **fields
        )
        branch.append(CHAT)
        whole = [*CHAT, {"role": "assistant", "content": "yes"}, *CHAT]
        assert branch.token_ids == ids_of_chat(tokenizer, whole)


# T4


@pytest.mark.parametrize("meta", ["first", "always", "never"])
def test_a_piece_goes_on_without_a_space_of_its_own(engine_of: Any, meta: str) -> None:
    tokenizer = tok(meta=meta)
    engine = engine_of(tokenizer)
    with engine.open("the cat") as branch:
        branch.append("s sat")
        assert tokenizer.decode(branch.token_ids) == "the cats sat"
    s, mark = tokenizer.convert_tokens_to_ids(["s", "\u2581"])
    scores = engine.score("the cat", ["s", " s", [s], [mark, s]])
    assert len(scores[0].token_logprobs) == 1
    assert len(scores[1].token_logprobs) == 2
    assert scores[0] == scores[2]
    assert scores[1] == scores[3]


# T5


def test_the_space_before_generated_text_is_kept(engine_of: Any) -> None:
    tokenizer = stripping([("\u2581", "b")])
    engine = engine_of(tokenizer)
    b = tokenizer.convert_tokens_to_ids("\u2581b")
    for prompt in ("a", spoken(engine, "a")):
        fields = {"max_new_tokens": 2, "temperature": 0}
        fields["logits_processors"] = [say(len(spoken(engine, "a")), [b])]
        result = engine.generate(prompt, **fields)
        assert result.text == " b b"
        assert tokenizer.decode([*spoken(engine, "a"), b, b]) == "a b b"
        assert "".join(delta.text for delta in engine.stream(prompt, **fields)) == " b b"
        with engine.open(prompt) as branch:
            assert branch.generate(**fields).text == " b b"
        stopped = engine.generate(prompt, stop=" b", **fields).samples[0]
        assert (stopped.text, stopped.token_ids, stopped.stop_reason) == ("", [b], " b")
        beams = engine.generate(prompt, BeamParams(width=2, max_new_tokens=3))
        for sample in beams.samples:
            whole = tokenizer.decode([*spoken(engine, "a"), *sample.token_ids])
            whole = tokenizer.decode(
                [*spoken(engine, "a"), *sample.token_ids], skip_special_tokens=True
            )
            assert "a" + sample.text == whole


# T6


def test_a_rendered_chat_begins_once(engine_of: Any) -> None:
    tokenizer = tok(bos=True, template="<s>" + TURNS)
    engine = engine_of(tokenizer)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    expected = ids_of_chat(tokenizer, CHAT)
    assert expected[:2].count(1) == 1
    assert engine.generate(rendered, max_new_tokens=1).prompt_token_ids == expected
    assert engine.generate("<s>", max_new_tokens=1).prompt_token_ids == [1]
    assert engine.generate("hi", max_new_tokens=1).prompt_token_ids[:2] == [1, *spoken(engine, "h")]
    with engine.open(rendered) as branch:
        assert branch.token_ids == expected
    request = engine.submit(rendered, max_new_tokens=1)
    engine.abort(request)
    assert request.prompt_token_ids == expected


# C6


@pytest.mark.parametrize("in_config", [2, None, [2, 3]])
def test_the_tokenizers_own_end_token_ends_a_turn(engine_of: Any, in_config: Any) -> None:
    tokenizer = tok(eos="<|end|>")
    engine = engine_of(tokenizer, eos_token_id=in_config)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end in engine.eos_token_ids
    fields = {"max_new_tokens": 9, "temperature": 0}
    said = say(1, [*spoken(engine, "yes"), end])
    (sample,) = engine.generate("x", logits_processors=[said], **fields).samples
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("yes", "stop", end)
    if in_config is not None:
        said = say(1, [*spoken(engine, "yes"), 2])
        (sample,) = engine.generate("x", logits_processors=[said], **fields).samples
        assert (sample.text, sample.finish_reason, sample.stop_reason) == ("yes", "stop", 2)


# C7

CHECKS_CALLS = (
    "{% for m in messages %}{% if m.role == 'tool' and not (loop.index0 and "
    "(messages[loop.index0 - 1].tool_calls or messages[loop.index0 - 1].role == 'tool')) %}"
    "{{ raise_exception('a tool answer needs a call') }}{% endif %}"
    "<|r|>{{ m['role'] }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|r|>assistant\n{% endif %}"
)
ANSWER = {"role": "tool", "content": "42", "tool_call_id": "123456789"}


@pytest.mark.parametrize("as_chat", [True, False])
@pytest.mark.parametrize("ended", ["", "<|end|>", "</s>"])
@pytest.mark.parametrize(
    "said", ['<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "f(x=1)"]
)
def test_a_tool_answer_goes_on_after_the_call(
    engine_of: Any, said: str, ended: str, as_chat: bool
) -> None:
    tokenizer = tok(template=CHECKS_CALLS)
    engine = engine_of(tokenizer)
    said_ids = spoken(engine, said + ended)
    opened = "<|r|>user\nhi<|end|>\n<|r|>assistant\n"
    with engine.open(CHAT if as_chat else opened) as branch:
        branch.generate(
            max_new_tokens=len(said_ids),
            temperature=0,
            stop_token_ids=tokenizer.convert_tokens_to_ids(["<|end|>"]),
            logits_processors=[say(len(branch), said_ids)],
        )
        branch.append([ANSWER])
        answered = f"{opened}{said}<|end|>\n<|r|>tool\n42<|end|>\n<|r|>assistant\n"
        assert tokenizer.decode(branch.token_ids) == answered
        assert branch.token_ids == spoken(engine, answered)
        branch.generate(
            max_new_tokens=4, temperature=0, logits_processors=[say(len(branch), said_ids[:4])]
        )
        branch.append(MORE)
        more = f"{said[:4]}<|end|>\n<|r|>user\nmore<|end|>\n<|r|>assistant\n"
        assert tokenizer.decode(branch.token_ids) == answered + more


@pytest.mark.parametrize(
    "wrong", ["gpt2", 3, object(), dict], ids=["name", "number", "object", "type"]
)
def test_what_is_no_tokenizer_is_refused_by_name(tiny_model: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match="tokenizer: expected None or a tokenizer"):
        Engine(tiny_model("llama"), wrong, kv=KV)


def test_a_raw_tokenizer_is_refused_with_what_wraps_it(tiny_model: Any) -> None:
    with pytest.raises(TypeError, match="PreTrainedTokenizerFast"):
        Engine(tiny_model("llama"), tok().backend_tokenizer, kv=KV)
