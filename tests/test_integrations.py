"""LangChain, LlamaIndex and lm-evaluation-harness on one engine, each by its real package."""

from __future__ import annotations

import asyncio
import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import normalizers

from radixkv import Engine, KVConfig, SamplingParams
from radixkv.integrations.common import answer_key

GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
PROMPTS = ["In the beginning", "In the end", "Another thing altogether"]


@pytest.fixture(scope="module")
def engine(tiny_model: Any, byte_tokenizer: Any) -> Iterator[Engine]:
    model = tiny_model("llama", vocab_size=len(byte_tokenizer), seed=3)
    kv = KVConfig(dtype="model", page_size=4, capacity="4MiB")
    with Engine(model, byte_tokenizer, kv=kv) as engine:
        yield engine
        engine.cache.check()


@pytest.fixture(autouse=True)
def _nothing_leaks(engine: Engine) -> Iterator[None]:
    yield
    stats = engine.cache.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def stop_in(text: str) -> str:
    """A piece from the middle of ``text`` that comes there first."""
    return next(text[i : i + 2] for i in range(3, len(text)) if text.find(text[i : i + 2]) == i)


# LangChain


@pytest.fixture(scope="module")
def chain_llm(engine: Engine) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's own, of other versions' names
        from radixkv.integrations.langchain import RadixKVLLM

    return RadixKVLLM(engine=engine, params=GREEDY)


def test_langchain_gives_the_engines_text_one_by_one_and_as_one_batch(
    engine: Engine, chain_llm: Any
) -> None:
    expected = [engine.generate(prompt, GREEDY).text for prompt in PROMPTS]
    assert [chain_llm.invoke(prompt) for prompt in PROMPTS] == expected
    steps = engine.stats().steps
    assert chain_llm.batch(PROMPTS) == expected
    assert engine.stats().steps - steps < 2 * GREEDY.max_new_tokens  # not one after another
    assert asyncio.run(chain_llm.abatch(PROMPTS)) == expected


def test_langchain_streams_what_it_would_return(engine: Engine, chain_llm: Any) -> None:
    from langchain_core.callbacks import BaseCallbackHandler

    seen: list[str] = []

    class Handler(BaseCallbackHandler):
        def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            seen.append(token)

    whole = chain_llm.invoke(PROMPTS[0])
    pieces = list(chain_llm.stream(PROMPTS[0], config={"callbacks": [Handler()]}))
    assert "".join(pieces) == whole == "".join(seen)
    assert len(pieces) > 1

    async def collect() -> list[str]:
        return [piece async for piece in chain_llm.astream(PROMPTS[0])]

    assert "".join(asyncio.run(collect())) == whole
    stream = chain_llm.stream(PROMPTS[0], max_new_tokens=100)
    next(stream)
    aborted = engine.stats().requests_aborted
    stream.close()
    assert engine.stats().requests_aborted == aborted + 1


def test_langchain_stop_replaces_and_is_not_part_of_the_text(chain_llm: Any) -> None:
    whole = chain_llm.invoke(PROMPTS[0])
    stop = stop_in(whole)
    expected = whole[: whole.find(stop)]
    assert chain_llm.invoke(PROMPTS[0], stop=[stop, "\0"]) == expected
    assert "".join(chain_llm.stream(PROMPTS[0], stop=[stop])) == expected
    assert chain_llm.bind(stop=[stop]).invoke(PROMPTS[0]) == expected


def test_langchain_counts_tokens_and_gives_every_sample(engine: Engine, chain_llm: Any) -> None:
    engine.cache.clear()
    output = chain_llm.generate(PROMPTS[:2], n=3, temperature=1.0, seed=5)
    expected = engine.generate(
        PROMPTS[:2], n=3, seed=5, temperature=1.0, max_new_tokens=12, ignore_eos=True
    )
    texts = [[generation.text for generation in row] for row in output.generations]
    assert texts == [[sample.text for sample in result.samples] for result in expected]
    assert output.generations[0][0].generation_info["finish_reason"] == "length"
    usage = chain_llm.generate(PROMPTS[:1]).llm_output["token_usage"]
    num_prompt = len(expected[0].prompt_token_ids)
    assert usage == {
        "prompt_tokens": num_prompt,
        "cached_tokens": num_prompt - 1,
        "completion_tokens": 12,
        "total_tokens": num_prompt + 12,
    }
    assert chain_llm.get_num_tokens("the") == 1
    assert chain_llm.get_num_tokens("") == 0


def test_langchain_chains_and_names_what_is_wrong(engine: Engine, chain_llm: Any) -> None:
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import PromptTemplate

    chain = PromptTemplate.from_template("In the {when}") | chain_llm | StrOutputParser()
    assert chain.invoke({"when": "end"}) == engine.generate("In the end", GREEDY).text
    with pytest.raises(TypeError, match="no_such_field"):
        chain_llm.invoke("x", no_such_field=1)
    with pytest.raises(ValueError, match="Engine"):
        type(chain_llm)(engine="not one")
    other = type(chain_llm)(engine=engine, params=SamplingParams(seed=1))
    assert other.asdict() != chain_llm.asdict()  # the key of LangChain's response cache


# LlamaIndex


@pytest.fixture(scope="module")
def index_llm(engine: Engine) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from radixkv.integrations.llama_index import RadixKVLLM

    return RadixKVLLM(engine=engine, params=GREEDY)


def test_llama_index_completes_and_streams_what_the_engine_says(
    engine: Engine, index_llm: Any
) -> None:
    result = engine.generate(PROMPTS[0], GREEDY)
    response = index_llm.complete(PROMPTS[0])
    assert (response.text, response.raw.samples) == (result.text, result.samples)
    num_prompt = len(result.prompt_token_ids)
    usage = {
        "prompt_tokens": num_prompt,
        "cached_tokens": num_prompt - 1,
        "completion_tokens": 12,
        "total_tokens": num_prompt + 12,
        "finish_reason": "length",
    }
    assert response.additional_kwargs == usage
    pieces = list(index_llm.stream_complete(PROMPTS[0]))
    assert "".join(piece.delta for piece in pieces) == pieces[-1].text == result.text
    assert pieces[-1].additional_kwargs == usage
    stop = stop_in(result.text)
    cut = result.text[: result.text.find(stop)]
    assert index_llm.complete(PROMPTS[0], stop=[stop]).text == cut
    assert [*index_llm.stream_complete(PROMPTS[0], stop=[stop])][-1].text == cut
    assert index_llm.metadata.context_window == engine.max_positions
    assert index_llm.metadata.num_output == 12


def test_llama_index_chats_by_the_models_template(engine: Engine, index_llm: Any) -> None:
    from llama_index.core.llms import ChatMessage

    assert index_llm.metadata.is_chat_model
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    messages = [ChatMessage(**message) for message in chat]
    expected = engine.generate(chat, GREEDY).text
    assert index_llm.chat(messages).message.content == expected
    assert index_llm.chat(messages).message.role == "assistant"
    assert [*index_llm.stream_chat(messages)][-1].message.content == expected

    async def both() -> tuple[Any, list[Any]]:
        streamed = [piece async for piece in await index_llm.astream_chat(messages)]
        return await index_llm.achat(messages), streamed

    answer, streamed = asyncio.run(both())
    assert answer.message.content == streamed[-1].message.content == expected


def test_llama_index_calls_at_the_same_time_are_one_batch(engine: Engine, index_llm: Any) -> None:
    expected = [engine.generate(prompt, GREEDY).text for prompt in PROMPTS]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(index_llm.acomplete(prompt) for prompt in PROMPTS))

    steps = engine.stats().steps
    assert [response.text for response in asyncio.run(all_at_once())] == expected
    assert engine.stats().steps - steps < 2 * GREEDY.max_new_tokens

    async def streamed() -> str:
        return "".join([piece.delta async for piece in await index_llm.astream_complete("In the")])

    assert asyncio.run(streamed()) == engine.generate("In the", GREEDY).text
    stream = index_llm.stream_complete(PROMPTS[0], max_new_tokens=100)
    next(stream)
    stream.close()


# lm-evaluation-harness


@pytest.fixture(scope="module")
def harness() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lm_eval.api.instance
        import lm_eval.evaluator
        import lm_eval.tasks

        import radixkv.integrations.lm_eval  # noqa: F401 - registers the model
    return lm_eval


@pytest.fixture
def eval_lm(engine: Engine, harness: Any) -> Any:
    from radixkv.integrations.lm_eval import RadixKVLM

    return RadixKVLM(engine)


def own_logprobs(engine: Engine, token_ids: list[int], num_context: int) -> tuple[float, bool]:
    """What transformers says of the tokens after a context, in one dense pass."""
    with torch.inference_mode():
        logits = engine.model(input_ids=torch.tensor([token_ids])).logits[0, num_context - 1 : -1]
    ids = torch.tensor(token_ids[num_context:])
    logprobs = logits.log_softmax(-1).gather(1, ids[:, None])
    return float(logprobs.sum()), bool((logits.argmax(-1) == ids).all())


def instances(harness: Any, kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [
        harness.api.instance.Instance(request_type=kind, doc={}, arguments=each, idx=0)
        for each in arguments
    ]


def test_lm_eval_loglikelihoods_are_the_models_and_run_a_shared_context_once(
    engine: Engine, harness: Any, eval_lm: Any
) -> None:
    context = "The answer to the first question, and to the second one, is"
    pairs = [(context, " yes"), ("", "alone"), (context, " no, not at all"), ("The answer", " on")]
    pairs += [(context + " ", "yes"), (context, " " + engine.generate(context, GREEDY).text[:1])]
    engine.cache.clear()
    before = engine.cache.stats().lookup_tokens
    answers = eval_lm.loglikelihood(instances(harness, "loglikelihood", pairs))
    num_context = len(eval_lm.tok_encode(context))
    # One look-up for all pairs of the long context: its blank belongs to the continuation.
    assert engine.cache.stats().lookup_tokens - before < 2 * num_context
    for (before_text, tail), (logprob, is_greedy) in zip(pairs, answers, strict=True):
        text = before_text.rstrip()
        head = eval_lm.tok_encode(text) if text else [eval_lm.prefix_token_id]
        whole = [*head, *eval_lm.tok_encode(before_text + tail)[len(head) if text else 0 :]]
        expected, greedy = own_logprobs(engine, whole, len(head))
        assert logprob == pytest.approx(expected, abs=1e-3)
        assert is_greedy == greedy


def test_lm_eval_rolls_over_texts_longer_than_the_model(
    engine: Engine, harness: Any, eval_lm: Any
) -> None:
    texts = ["short", "long text, " * 40, ""]
    answers = eval_lm.loglikelihood_rolling(
        instances(harness, "loglikelihood_rolling", [(text,) for text in texts])
    )
    for text, answer in zip(texts, answers, strict=True):
        ids, total, size = eval_lm.tok_encode(text), 0.0, eval_lm.max_length
        for begin in range(0, len(ids), size):  # each token once, as much context as fits
            end = min(begin + size, len(ids))
            window = [eval_lm.prefix_token_id, *ids][max(0, end - size) : end + 1]
            total += own_logprobs(engine, window, len(window) - (end - begin))[0]
        assert answer == pytest.approx(total, abs=2e-2)
    assert len(eval_lm.tok_encode(texts[1])) > eval_lm.max_length
    assert answers[2] == 0.0


def test_lm_eval_generates_until_a_stop_string(engine: Engine, harness: Any, eval_lm: Any) -> None:
    whole = engine.generate(PROMPTS[0], temperature=0, max_new_tokens=12).text
    stop = stop_in(whole)
    asked: list[tuple[str, dict[str, Any]]] = [
        (PROMPTS[0], {"until": [stop, "\0", ""], "max_gen_toks": 12}),
        (PROMPTS[0], {"until": "\0", "max_gen_toks": 12, "do_sample": False}),
        (PROMPTS[1], {"temperature": 0.8, "do_sample": True, "top_p": 0.9, "max_gen_toks": 5}),
        ("long " * 300, {"max_gen_toks": 3}),
    ]
    texts = eval_lm.generate_until(instances(harness, "generate_until", list(asked)))
    assert texts[:2] == [whole[: whole.find(stop)], whole]
    assert len(texts) == 4
    with pytest.raises(ValueError, match=r"generation_kwargs: expected .* got num_beams"):
        eval_lm.generate_until(instances(harness, "generate_until", [("x", {"num_beams": 2})]))


def test_lm_eval_runs_tasks_of_local_data(engine: Engine, harness: Any, eval_lm: Any) -> None:
    import datasets

    questions = [f"What is {a} and {b}?" for a in range(2) for b in range(3)]
    rows = [{"q": q, "choices": [" one", " two", " three"], "gold": 1} for q in questions]

    def local(**kwargs: Any) -> dict[str, Any]:
        return {"test": datasets.Dataset.from_list(rows)}

    common = {"custom_dataset": local, "test_split": "test", "dataset_path": "local"}
    tasks = [
        common
        | {
            "task": "choose",
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": "acc"}],
        },
        common
        | {
            "task": "say",
            "output_type": "generate_until",
            "doc_to_text": "{{q}}",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["?"], "max_gen_toks": 4},
            "metric_list": [{"metric": "exact_match"}],
        },
        common
        | {
            "task": "read",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{q}}",
            "metric_list": [{"metric": "byte_perplexity"}],
        },
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = harness.evaluator.simple_evaluate(
            model=eval_lm,
            tasks=tasks,
            task_manager=harness.tasks.TaskManager(include_defaults=False),  # not 10,000 files
            bootstrap_iters=0,
        )
    results = report["results"]
    right, nats = 0, 0.0
    for q in questions:
        head = eval_lm.tok_encode(q)
        tails = [eval_lm.tok_encode(choice) for choice in rows[0]["choices"]]
        scores = [own_logprobs(engine, head + tail, len(head))[0] for tail in tails]
        right += scores.index(max(scores)) == 1
        nats -= own_logprobs(engine, [eval_lm.prefix_token_id, *head], 1)[0]
    assert results["choose"]["acc,none"] == pytest.approx(right / len(questions))
    num_bytes = sum(len(q.encode()) for q in questions)
    assert results["read"]["byte_perplexity,none"] == pytest.approx(
        math.exp(nats / num_bytes), rel=1e-4
    )
    said = engine.generate(questions, temperature=0, max_new_tokens=4, stop="?")
    samples = report["samples"]["say"]
    assert [sample["resps"][0][0] for sample in samples] == [result.text for result in said]


def test_a_lasting_key_of_answers_knows_how_the_tokenizer_splits_and_its_template(
    tiny_model: Any, byte_tokenizer: Any
) -> None:
    def key(tokenizer: Any) -> dict[str, str]:
        with Engine(tiny_model("llama"), tokenizer, kv=KVConfig(capacity="1MiB")) as engine:
            return answer_key(engine, SamplingParams(seed=1), None, lasting=True)

    other_template = copy.deepcopy(byte_tokenizer)
    other_template.chat_template = "{{ messages[0].content }}!"
    other_split = copy.deepcopy(byte_tokenizer)
    other_split.backend_tokenizer.normalizer = normalizers.Lowercase()
    keys = [key(one) for one in (byte_tokenizer, copy.deepcopy(byte_tokenizer))]
    assert keys[0] == keys[1]
    assert keys[0] not in (key(other_template), key(other_split))
