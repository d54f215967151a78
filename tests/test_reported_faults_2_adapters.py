"""The second collection of reported faults: LangChain, LlamaIndex, lm-eval, options, commands."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from radixkv import Engine, KVConfig, SamplingParams
from radixkv.errors import UnknownOptionError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the packages' own, of other versions' names
    from langchain_core.caches import InMemoryCache
    from langchain_core.globals import set_llm_cache
    from langchain_core.messages import AIMessage, FunctionMessage, HumanMessage, ToolMessage
    from langchain_core.prompt_values import ChatPromptValue, ImagePromptValue
    from llama_index.core.base.llms import types as blocks
    from llama_index.core.extractors import TitleExtractor
    from llama_index.core.ingestion import IngestionCache, IngestionPipeline
    from llama_index.core.llms import ChatMessage
    from llama_index.core.schema import TextNode

    from radixkv.integrations.langchain import RadixKVLLM as ChainLLM
    from radixkv.integrations.llama_index import RadixKVLLM as IndexLLM

KV = KVConfig(dtype="model", page_size=4, capacity="4MiB")
CONFIG = dict(
    vocab_size=270,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
TEMPLATE = (
    "{% for m in messages %}<|r|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|r|>assistant\n{% endif %}"
)


def llama(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**CONFIG, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def make_tokenizer(
    merges: Any = (), *, bos: bool = False, template: str = TEMPLATE, meta: str | None = None
) -> Any:
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    letters = ["▁", *map(chr, range(10, 127))]
    for symbol in letters if meta else sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(symbol, len(vocab))
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    if meta:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=meta, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=meta)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|r|>", "<|end|>"],
    )
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    """Two engines whose models differ in weights alone."""
    with (
        Engine(llama(0), make_tokenizer(), kv=KV) as one,
        Engine(llama(1), make_tokenizer(), kv=KV) as two,
    ):
        yield [one, two]
        for engine in (one, two):
            engine.cache.check()


@pytest.fixture
def answers() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


def steps_of(engine: Engine, call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call gives, and how many steps the engine ran for it."""
    before = engine.stats().steps
    return call(), engine.stats().steps - before


GREEDY = dict(temperature=0, max_new_tokens=6, ignore_eos=True)


# A2: LangChain's cache of answers


def test_two_engines_never_answer_for_each_other(
    engines: list[Engine], answers: InMemoryCache
) -> None:
    for engine in engines:
        expected = engine.generate("x", **GREEDY).text
        llm = ChainLLM(engine=engine, **GREEDY)
        answer, steps = steps_of(engine, lambda llm=llm: llm.invoke("x"))
        assert (answer, steps > 0) == (expected, True)
        assert steps_of(engine, lambda llm=llm: llm.invoke("x")) == (expected, 0)
        same = ChainLLM(engine=engine, **GREEDY)
        assert steps_of(engine, lambda llm=same: asyncio.run(llm.ainvoke("x"))) == (expected, 0)
    assert engines[0].generate("x", **GREEDY).text != engines[1].generate("x", **GREEDY).text


def test_what_changes_an_answer_is_in_the_key(engines: list[Engine], answers: Any) -> None:
    engine = engines[0]
    llm = ChainLLM(engine=engine, **GREEDY)
    llm.invoke("x")
    others = [
        lambda: llm.invoke("x", max_new_tokens=3),
        lambda: llm.invoke("x", temperature=1.0, seed=3),
        lambda: llm.invoke("x", stop=["q"]),
        lambda: llm.bind(repetition_penalty=5.0).invoke("x"),
        lambda: llm.batch(["x"], logit_bias={7: 100}),
        lambda: asyncio.run(llm.ainvoke("x", max_new_tokens=4)),
        lambda: ChainLLM(engine=engine, **GREEDY, namespace="tenant").invoke("x"),
        lambda: ChainLLM(engine=engine, params=SamplingParams(max_new_tokens=5)).invoke("x"),
    ]
    for number, other in enumerate(others):
        assert steps_of(engine, other)[1] > 0, number
        assert steps_of(engine, other)[1] == 0, number
    kv = KVConfig(dtype="int4", page_size=4, capacity="4MiB")
    with Engine(engine.model, engine.tokenizer, kv=kv) as coarse:
        again = ChainLLM(engine=coarse, **GREEDY)
        assert steps_of(coarse, lambda: again.invoke("x"))[1] > 0


def test_a_changed_model_is_asked_again(answers: InMemoryCache) -> None:
    model = llama(3)
    with Engine(model, make_tokenizer(), kv=KV) as engine:
        llm = ChainLLM(engine=engine, **GREEDY)
        before, without_cache = llm.invoke("x"), ChainLLM(engine=engine, cache=False)
        mark = without_cache.asdict()
        assert without_cache.asdict() == mark
        with torch.no_grad():
            model.lm_head.weight.neg_()
        assert without_cache.asdict() != mark
        after, steps = steps_of(engine, lambda: llm.invoke("x"))
        assert steps > 0
        assert after == engine.generate("x", **GREEDY).text != before


def test_the_key_of_one_model_is_one_in_two_engines(engines: list[Engine], answers: Any) -> None:
    with Engine(llama(0), make_tokenizer(), kv=KV) as twin:
        keys = [ChainLLM(engine=e, **GREEDY).asdict() for e in (engines[0], twin, engines[1])]
    assert keys[0] == keys[1] != keys[2]


def test_what_has_no_name_is_asked_every_time(engines: list[Engine], answers: Any) -> None:
    engine = engines[0]

    def always(token_id: int) -> Callable[..., Any]:
        def process(input_ids: Any, logits: Any) -> Any:
            out = torch.full_like(logits, -1e9)
            out[:, token_id] = 0
            return out

        return process

    for token_id in (20, 21, 20):
        expected = engine.tokenizer.decode([token_id] * 6)
        llm = ChainLLM(engine=engine, **GREEDY, logits_processors=[always(token_id)])
        assert llm.invoke("x") == expected
        plain = ChainLLM(engine=engine, **GREEDY)
        assert plain.invoke("x", logits_processors=[always(token_id)]) == expected
    for _ in range(2):
        llm = ChainLLM(engine=engine, **GREEDY, namespace=object())
        assert steps_of(engine, lambda llm=llm: llm.invoke("x"))[1] > 0


def test_a_cache_of_its_own_counts_as_one(engines: list[Engine]) -> None:
    cache = InMemoryCache()
    texts = [ChainLLM(engine=e, cache=cache, **GREEDY).invoke("x") for e in engines]
    assert texts == [engine.generate("x", **GREEDY).text for engine in engines]


# A3: what one text cannot say, by LangChain

PARTS = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    {"type": "image", "base64": "AA==", "mime_type": "image/png"},
    {"type": "audio", "base64": "AA==", "mime_type": "audio/wav"},
    {"type": "video", "url": "http://x/y"},
    {"type": "file", "file_id": "f"},
    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    {"type": "reasoning", "reasoning": "hm"},
    {"json": {"a": 1}},
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: next(iter(part.values())))
def test_langchain_refuses_a_part_that_is_no_text_by_its_kind(
    engines: list[Engine], part: dict[str, Any]
) -> None:
    llm = ChainLLM(engine=engines[0], **GREEDY)
    chat = [HumanMessage(content=[{"type": "text", "text": "look"}, part])]
    kind = part.get("type", "json")
    calls: list[Callable[[], Any]] = [
        lambda: llm.invoke(chat),
        lambda: llm.batch([chat]),
        lambda: list(llm.stream(chat)),
        lambda: llm.generate_prompt([ChatPromptValue(messages=chat)]),
        lambda: asyncio.run(llm.ainvoke(chat)),
        lambda: asyncio.run(llm.agenerate_prompt([ChatPromptValue(messages=chat)])),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"part of type '{kind}' in message 0"):
            call()


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (ToolMessage("42", tool_call_id="c1"), "tool_call_id 'c1'"),
        (FunctionMessage(content="42", name="add"), "name 'add'"),
        (AIMessage("", additional_kwargs={"tool_calls": [{"x": 1}]}), "tool_calls"),
        (AIMessage("", additional_kwargs={"reasoning_content": "hm"}), "reasoning_content"),
        (
            AIMessage(
                "",
                invalid_tool_calls=[
                    {"name": "f", "args": "{", "id": "c", "error": "", "type": "invalid_tool_call"}
                ],
            ),
            "invalid_tool_calls",
        ),
    ],
    ids=lambda value: getattr(value, "type", None),
)
def test_langchain_refuses_what_a_message_has_beside_text(
    engines: list[Engine], message: Any, named: str
) -> None:
    llm = ChainLLM(engine=engines[0], **GREEDY)
    with pytest.raises(ValueError, match=rf"{named}.* in message 1 .*which would be lost"):
        llm.invoke([HumanMessage("hi"), message])


def test_langchain_writes_text_parts_and_calls(engines: list[Engine]) -> None:
    from langchain_core.messages import get_buffer_string

    engine = engines[0]
    llm = ChainLLM(engine=engine, **GREEDY)
    call = {"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}
    chat = [
        HumanMessage(content=["one ", {"type": "text", "text": "two"}]),
        AIMessage("", tool_calls=[call], additional_kwargs={"refusal": None}),
    ]
    text = get_buffer_string(chat)
    assert text.startswith("Human: one two\nAI: ")
    assert "'add'" in text
    assert llm.invoke(chat) == engine.generate(text, **GREEDY).text
    with pytest.raises(ValueError, match="got an image"):
        llm.generate_prompt([ImagePromptValue(image_url={"url": "x"})])


# A4: fields of a constructor


def test_langchains_constructor_takes_sampling_fields_and_refuses_others(
    engines: list[Engine],
) -> None:
    engine = engines[0]
    assert ChainLLM(engine=engine, temperature=0.1).params.temperature == 0.1
    both = ChainLLM(engine=engine, params=SamplingParams(seed=3, n=2), temperature=0, n=None)
    assert both.params == SamplingParams(seed=3, temperature=0)
    assert ChainLLM(engine=engine, stop=None, top_k=-1, top_p=None).params == SamplingParams()
    assert ChainLLM(engine=engine, tags=["a"], verbose=True, cache=False).tags == ["a"]
    for name, said in (
        ("foo", "leave it out"),
        ("max_tokens", "max_new_tokens"),
        ("temprature", "did you mean temperature"),
        ("model", "Engine.from_pretrained"),
        ("model_kwargs", "field by field"),
        ("name_space", "did you mean namespace"),
    ):
        with pytest.raises(UnknownOptionError, match=f"RadixKVLLM: .*got '{name}'; .*{said}"):
            ChainLLM(engine=engine, **{name: 1})
    with pytest.raises(TypeError, match=r"RadixKVLLM\.params: expected SamplingParams, got 3"):
        ChainLLM(engine=engine, params=3)
    with pytest.raises(ValueError, match=r"SamplingParams\.top_p"):
        ChainLLM(engine=engine, top_p=3)


def test_langchains_calls_refuse_unknown_fields_on_every_road(engines: list[Engine]) -> None:
    llm = ChainLLM(engine=engines[0], **GREEDY)

    async def collect() -> list[str]:
        return [piece async for piece in llm.astream("x", max_tokens=1)]

    calls: list[Callable[[], Any]] = [
        lambda: llm.invoke("x", max_tokens=1),
        lambda: llm.batch(["x"], max_tokens=1),
        lambda: llm.generate(["x"], max_tokens=1),
        lambda: llm.bind(max_tokens=1).invoke("x"),
        lambda: list(llm.stream("x", max_tokens=1)),
        lambda: asyncio.run(llm.ainvoke("x", max_tokens=1)),
        lambda: asyncio.run(llm.abatch(["x"], max_tokens=1)),
        lambda: asyncio.run(collect()),
    ]
    for call in calls:
        with pytest.raises(UnknownOptionError, match="max_tokens is max_new_tokens here"):
            call()
    with pytest.raises(ValueError, match="n: expected 1 for a stream, got 3"):
        list(llm.stream("x", n=3))


def test_a_stop_of_langchain_may_be_one_string(engines: list[Engine]) -> None:
    engine = engines[0]
    llm = ChainLLM(engine=engine, **GREEDY)
    whole = llm.invoke("x")
    stop = whole[2:3]
    assert stop
    expected = engine.generate("x", **GREEDY, stop=stop).text
    assert llm.invoke("x", stop=stop) == llm.invoke("x", stop=[stop]) == expected
    assert "".join(llm.stream("x", stop=stop)) == expected


# A3, A4 and caches, by LlamaIndex

TOOLS_TEMPLATE = (
    "{% for m in messages %}<|r|>{{ m['role'] }}\n"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.a }})"
    "{% if c.id %}#{{ c.id }}{% endif %}{% endfor %}"
    "{% if m.tool_call_id %}@{{ m.tool_call_id }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|r|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tools_llm() -> Iterator[Any]:
    """An LLM whose template writes calls, ids and thoughts."""
    with Engine(llama(0), make_tokenizer(template=TOOLS_TEMPLATE), kv=KV) as engine:
        yield IndexLLM(engine=engine, **GREEDY)


def prompt_of(llm: Any, messages: list[Any]) -> str:
    """What the model reads for a chat, up to the answer."""
    result = llm.chat(messages).raw
    text: str = llm.engine.tokenizer.decode(result.prompt_token_ids)
    return text.removesuffix("<|r|>assistant\n")


def chat_calls(llm: Any, messages: list[Any], **fields: Any) -> list[Callable[[], Any]]:
    """One chat on each road."""

    async def collect() -> Any:
        return [piece async for piece in await llm.astream_chat(messages, **fields)]

    return [
        lambda: llm.chat(messages, **fields),
        lambda: list(llm.stream_chat(messages, **fields)),
        lambda: asyncio.run(llm.achat(messages, **fields)),
        lambda: asyncio.run(collect()),
    ]


NO_TEXT = [
    blocks.ImageBlock(image=b"\x89PNG"),
    blocks.ImageBlock(url="http://x/y.png"),
    blocks.AudioBlock(audio=b"RIFF", format="wav"),
    blocks.VideoBlock(url="http://x/y.mp4"),
    blocks.DocumentBlock(data=b"%PDF", title="t"),
    blocks.CitableBlock(title="t", source="s", content="text"),
    blocks.CitationBlock(title="t", source="s", cited_content="text", additional_location_info={}),
]


@pytest.mark.parametrize("block", NO_TEXT, ids=lambda block: block.block_type)
def test_llama_index_refuses_a_block_that_is_no_text_by_its_kind(
    tools_llm: Any, block: Any
) -> None:
    messages = [
        ChatMessage("hi"),
        ChatMessage(role="user", blocks=[blocks.TextBlock(text="look"), block]),
    ]
    for call in chat_calls(tools_llm, messages):
        with pytest.raises(ValueError, match=f"block of type '{block.block_type}' in message 1"):
            call()


def test_every_kind_of_block_is_sent_or_refused() -> None:
    """A kind that comes with another version of the package must be thought about here."""
    union = blocks.ChatMessage.model_fields["blocks"].annotation.__args__[0].__origin__
    kinds = {kind.__name__ for kind in union.__args__}
    sent = {"TextBlock", "CachePoint", "ThinkingBlock", "ToolCallBlock"}
    assert kinds - sent == {type(block).__name__ for block in NO_TEXT}


def test_llama_index_sends_calls_ids_and_thoughts_where_the_template_has_a_place(
    tools_llm: Any, engines: list[Engine]
) -> None:
    call = blocks.ToolCallBlock(tool_call_id="c1", tool_name="add", tool_kwargs={"a": 7})
    text = blocks.ToolCallBlock(tool_name="sub", tool_kwargs='{"a": 8}')
    old = {"id": "c2", "type": "function", "function": {"name": "mul", "arguments": '{"a": 9}'}}
    same = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    point = blocks.CachePoint(cache_control=blocks.CacheControl(type="ephemeral"))
    messages = [
        ChatMessage(role="user", blocks=[blocks.TextBlock(text="one"), point]),
        ChatMessage(
            role="assistant",
            blocks=[blocks.ThinkingBlock(content="hm"), call, text],
            additional_kwargs={"tool_calls": [old, same], "refusal": None},
        ),
        ChatMessage(role="tool", content="16", additional_kwargs={"tool_call_id": "c1"}),
    ]
    read = prompt_of(tools_llm, messages)
    assert read == (
        "<|r|>user\none<|end|>\n<|r|>assistant\n[hm]add(7)#c1sub(8)mul(9)#c2<|end|>\n"
        "<|r|>tool\n16@c1<|end|>\n"
    )
    plain = IndexLLM(engine=engines[0], **GREEDY)  # its template writes role and content alone
    lost = [
        (messages[1], "thinking|tool_call"),
        (ChatMessage(role="assistant", blocks=[call]), "tool_call"),
        (ChatMessage(role="assistant", additional_kwargs={"tool_calls": [old]}), "tool_call"),
        (ChatMessage(role="assistant", blocks=[blocks.ThinkingBlock(content="x")]), "thinking"),
        (messages[2], "tool_call_id"),
        (ChatMessage("hi", additional_kwargs={"documents": ["d"]}), "documents"),
    ]
    for message, kind in lost:
        for road in chat_calls(plain, [message]):
            with pytest.raises(ValueError, match=f"got .*({kind}).* in message 0"):
                road()
    broken = ChatMessage(role="assistant", additional_kwargs={"tool_calls": ["f(x)"]})
    with pytest.raises(ValueError, match="a tool call 'f"):
        tools_llm.chat([broken])
    assert prompt_of(plain, [messages[0]]) == "<|r|>user\none<|end|>\n"


def test_an_argument_of_calls_that_is_no_json_stays_text(tools_llm: Any) -> None:
    from radixkv.integrations.llama_index import _as_message

    call = blocks.ToolCallBlock(tool_call_id="c", tool_name="f", tool_kwargs="{broken")
    message = _as_message(ChatMessage(role="assistant", blocks=[call]), 0, TOOLS_TEMPLATE)
    assert message["tool_calls"][0]["function"]["arguments"] == "{broken"


def test_messages_to_prompt_is_used_where_it_is_given(engines: list[Engine]) -> None:
    engine = engines[0]
    llm = IndexLLM(engine=engine, messages_to_prompt=lambda m: f"<{m[0].content}>", **GREEDY)
    result = llm.chat([ChatMessage("hi")]).raw
    assert engine.tokenizer.decode(result.prompt_token_ids) == "<hi>"


def test_llama_indexs_constructor_and_calls_take_sampling_fields_and_refuse_others(
    engines: list[Engine],
) -> None:
    engine = engines[0]
    assert IndexLLM(engine=engine, temperature=0.1).params.temperature == 0.1
    both = IndexLLM(engine=engine, params=SamplingParams(seed=3), temperature=0, system_prompt="s")
    assert (both.params, both.system_prompt) == (SamplingParams(seed=3, temperature=0), "s")
    for name, said in (("foo", "leave it out"), ("max_tokens", "max_new_tokens")):
        with pytest.raises(UnknownOptionError, match=f"RadixKVLLM: .*got '{name}'; .*{said}"):
            IndexLLM(engine=engine, **{name: 1})
    llm = IndexLLM(engine=engine, **GREEDY)
    expected = engine.generate("x", **{**GREEDY, "max_new_tokens": 3}).text
    assert llm.complete("x", max_new_tokens=3).text == expected

    async def collect() -> Any:
        return [piece async for piece in await llm.astream_complete("x", max_tokens=1)]

    calls = [
        *chat_calls(llm, [ChatMessage("hi")], max_tokens=1),
        lambda: llm.complete("x", max_tokens=1),
        lambda: list(llm.stream_complete("x", max_tokens=1)),
        lambda: asyncio.run(llm.acomplete("x", max_tokens=1)),
        lambda: asyncio.run(collect()),
    ]
    for call in calls:
        with pytest.raises(UnknownOptionError, match="max_tokens is max_new_tokens here"):
            call()
    for call in (lambda: llm.stream_complete("x", n=2), lambda: llm.stream_chat([], n=2)):
        with pytest.raises(ValueError, match="n: expected 1 for a stream, got 2"):
            call()


def test_a_cache_of_transformations_tells_two_engines_apart(engines: list[Engine]) -> None:
    cache = IngestionCache()
    for engine in engines:
        for expected in (True, False):  # asked, then found
            title = TitleExtractor(llm=IndexLLM(engine=engine, **GREEDY), num_workers=1)
            pipeline = IngestionPipeline(transformations=[title], cache=cache)
            node = TextNode(text="some text")
            _, steps = steps_of(engine, lambda p=pipeline, n=node: p.run(nodes=[n]))
            assert (steps > 0) == expected


# T1 and T6 through the adapters


def say(num_prompt: int, token_ids: list[int]) -> Callable[..., Any]:
    """A logits processor: after a prompt these tokens come, the last one for ever."""

    def process(input_ids: Any, logits: Any) -> Any:
        out = torch.full_like(logits, -1e9)
        out[:, token_ids[min(input_ids.shape[1] - num_prompt, len(token_ids) - 1)]] = 0
        return out

    return process


def test_a_stop_string_of_a_special_token_ends_an_adapters_text(engines: list[Engine]) -> None:
    engine = engines[0]
    hello = engine.tokenizer("hello")["input_ids"]
    end = engine.tokenizer.convert_tokens_to_ids("<|end|>")
    fields = dict(temperature=0, max_new_tokens=11, stop="<|end|>")
    fields["logits_processors"] = [say(1, [*hello, end, *hello])]
    chain = ChainLLM(engine=engine, **fields)
    assert chain.invoke("x") == "".join(chain.stream("x")) == "hello"
    assert asyncio.run(chain.ainvoke("x")) == "hello"
    assert (
        ChainLLM(engine=engine, **{**fields, "stop": ()}).invoke("x", stop=["<|end|>"]) == "hello"
    )
    index = IndexLLM(engine=engine, **fields)
    assert index.complete("x").text == [*index.stream_complete("x")][-1].text == "hello"
    assert index.complete("x").additional_kwargs["finish_reason"] == "stop"


def test_a_rendered_chat_begins_once_through_the_adapters() -> None:
    template = "<s>" + TEMPLATE
    with Engine(llama(0), make_tokenizer(bos=True, template=template), kv=KV) as engine:
        chat = [{"role": "user", "content": "hi"}]
        text = engine.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids.count(1) == 1
        for prompt, num_tokens in ((text, len(ids)), ("hi", 3)):
            output = ChainLLM(engine=engine, **GREEDY).generate([prompt])
            assert output.llm_output["token_usage"]["prompt_tokens"] == num_tokens
            response = IndexLLM(engine=engine, **GREEDY).complete(prompt)
            assert response.raw.prompt_token_ids.count(1) == 1
        assert (
            IndexLLM(engine=engine, **GREEDY).chat([ChatMessage("hi")]).raw.prompt_token_ids == ids
        )
