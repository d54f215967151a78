"""An engine as a LangChain LLM: `RadixKVLLM`; needs `langchain-core` alone (extra `langchain`).

Everything runs in this process, on the caller's engine: the prompts of a batch, and of calls
that are made at the same time, are one batch of the engine and share what is cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Hashable, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.globals import get_llm_cache
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import AIMessage, BaseMessage, FunctionMessage, ToolMessage
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, ImagePromptValue, PromptValue
from pydantic import Field, InstanceOf

from radixkv.config import SamplingParams
from radixkv.engine.engine import Engine
from radixkv.engine.results import Delta, Result
from radixkv.integrations.common import answer_key, merge_params, one_sample
from radixkv.text import tokenizer_lock


class RadixKVLLM(BaseLLM):
    """Text in, text out, on an `Engine` that the caller made and closes.

    ``RadixKVLLM(engine=engine, temperature=0.2, max_new_tokens=64)``: fields of `SamplingParams`
    go into ``params``, and replace those of ``params`` where both are given. Every call takes
    ``stop=[...]``, which replaces ``params.stop``, and fields of `SamplingParams` as keywords,
    which replace those of ``params``. Other names raise `UnknownOptionError`. With ``n`` above 1
    a prompt gives ``n`` generations; a stream takes one sample.

    Messages become one text, as LangChain writes them ("Human: ..."). What such a text would
    lose (an image, the id of a tool call, ...) raises ValueError that names it; names of speakers
    alone are not written, as LangChain leaves it to each model.

    LangChain's cache of answers, where one is set, tells all apart that changes an answer: the
    model by its weights, pages, ``params``, the fields of a call, ``namespace``. Answers with
    ``logits_processors``, which have no name, are not found again.

    `LLMResult.llm_output` has ``token_usage``: ``prompt_tokens``, ``cached_tokens`` (of those,
    what came from the cache), ``completion_tokens``, ``total_tokens``. Each generation's
    ``generation_info`` has ``finish_reason``, ``stop_reason`` and, where asked for, ``logprobs``.

    Attributes:
        engine: what runs the prompts; it needs a tokenizer.
        params: how tokens are drawn and when a text ends.
        namespace: whose cache the prompts use; None is the common one.
    """

    engine: InstanceOf[Engine] = Field(exclude=True)
    params: InstanceOf[SamplingParams] = SamplingParams()
    namespace: Hashable = None

    def __init__(self, **fields: Any) -> None:
        super().__init__(**merge_params(type(self).__name__, fields, type(self).model_fields))

    @property
    def _llm_type(self) -> str:
        return "radixkv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        # LangChain's own cache of answers is keyed by these: all that changes an answer. To name
        # a model by its weights means to read them all, once: only where there is a cache.
        is_cached = self.cache if self.cache is not None else get_llm_cache()
        lasting = is_cached is not None and is_cached is not False
        return dict(answer_key(self.engine, self.params, self.namespace, lasting=lasting))

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of ``text`` by the engine's tokenizer, without special tokens."""
        tokenizer = self.engine.tokenizer
        with tokenizer_lock(tokenizer):
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    # LangChain's key of an answer holds this object's fields and ``stop``, but not what a call
    # gives as keywords: a call with some is one of an object that has them.

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """The generations of each prompt; see `BaseLLM.generate`."""
        llm, options = self._of_call(kwargs)
        return BaseLLM.generate(llm, prompts, stop, callbacks, **options)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        """`generate` for asyncio."""
        llm, options = self._of_call(kwargs)
        return await BaseLLM.agenerate(llm, prompts, stop, callbacks, **options)

    def _of_call(self, kwargs: dict[str, Any]) -> tuple[RadixKVLLM, dict[str, Any]]:
        """An object with the fields of a call, and what LangChain itself gives to one."""
        options = {name: kwargs[name] for name in _CALL_OPTIONS if name in kwargs}
        fields = {name: value for name, value in kwargs.items() if name not in options}
        if not fields:
            return self, options
        params = dataclasses.replace(self.params, **fields)
        return self.model_copy(update={"params": params}), options

    def _convert_input(self, model_input: Any) -> PromptValue:
        prompt: PromptValue = super()._convert_input(model_input)
        _require_flat(prompt)
        return prompt

    def generate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        """The generations of each prompt value; see `BaseLLM.generate_prompt`."""
        for prompt in prompts:
            _require_flat(prompt)
        return super().generate_prompt(prompts, *args, **kwargs)

    async def agenerate_prompt(
        self, prompts: list[PromptValue], *args: Any, **kwargs: Any
    ) -> LLMResult:
        """`generate_prompt` for asyncio."""
        for prompt in prompts:
            _require_flat(prompt)
        return await super().agenerate_prompt(prompts, *args, **kwargs)

    def _sampling(self, stop: list[str] | None, fields: dict[str, Any]) -> SamplingParams:
        if stop is not None:
            fields = {**fields, "stop": stop}
        return dataclasses.replace(self.params, **fields)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        params = self._sampling(stop, kwargs)
        return _as_output(self.engine.generate(prompts, params, namespace=self.namespace))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        params = self._sampling(stop, kwargs)
        return _as_output(await self.engine.agenerate(prompts, params, namespace=self.namespace))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        params = self._sampling(stop, one_sample(kwargs))
        with self.engine.stream(prompt, params, namespace=self.namespace) as deltas:
            for delta in deltas:
                chunk = _as_chunk(delta)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        params = self._sampling(stop, one_sample(kwargs))
        async for delta in self.engine.astream(prompt, params, namespace=self.namespace):
            chunk = _as_chunk(delta)
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


# What `BaseLLM.generate` takes beside prompts, ``stop`` and ``callbacks``.
_CALL_OPTIONS = ("tags", "metadata", "run_name", "run_id")
# Fields of a message that say nothing to a model, and those that LangChain writes into the text.
_SAYS_NOTHING = {"refusal", "parsed"}
_WRITTEN = {"function_call"}


def _require_flat(prompt: PromptValue) -> None:
    """Raise ValueError for what is lost where LangChain makes one text of a prompt."""
    if isinstance(prompt, ImagePromptValue):
        _refuse("text", "an image", "image")
    if isinstance(prompt, ChatPromptValue):
        for position, message in enumerate(prompt.messages):
            _require_flat_message(message, f"message {position} ({message.type})")


def _require_flat_message(message: BaseMessage, where: str) -> None:
    for part in [message.content] if isinstance(message.content, str) else message.content:
        if isinstance(part, str) or (part.get("type") == "text" and "text" in part):
            continue
        kind = part.get("type") or ", ".join(map(str, part))
        _refuse("content of text", f"a part of type {kind!r} in {where}", kind)
    if isinstance(message, FunctionMessage):
        _refuse("no answers of functions", f"the function's name {message.name!r} in {where}", "it")
    if isinstance(message, ToolMessage):
        _refuse("no answers of tools", f"tool_call_id {message.tool_call_id!r} in {where}", "tool")
    if isinstance(message, AIMessage) and message.invalid_tool_calls:
        _refuse("no broken calls", f"invalid_tool_calls in {where}", "invalid_tool_calls")
    for name, value in message.additional_kwargs.items():
        if value and name not in _SAYS_NOTHING | _WRITTEN:
            if name == "tool_calls" and isinstance(message, AIMessage) and message.tool_calls:
                continue  # the same as the parsed ones, which are written
            _refuse("messages of text", f"additional_kwargs[{name!r}] in {where}", name)


def _refuse(expected: str, got: str, what: str) -> None:
    raise ValueError(
        f"prompt: expected {expected}, since messages become one text here, got {got}, which "
        f"would be lost; leave the {what} out, or give the chat to engine.generate"
    )


def _as_output(results: list[Result]) -> LLMResult:
    prompt_tokens = sum(len(result.prompt_token_ids) for result in results)
    completion_tokens = sum(len(s.token_ids) for result in results for s in result.samples)
    return LLMResult(
        generations=[
            [
                Generation(
                    text=sample.text,
                    generation_info={
                        "finish_reason": sample.finish_reason,
                        "stop_reason": sample.stop_reason,
                        "logprobs": sample.logprobs,
                    },
                )
                for sample in result.samples
            ]
            for result in results
        ],
        llm_output={
            "token_usage": {
                "prompt_tokens": prompt_tokens,
                "cached_tokens": sum(result.cached_tokens for result in results),
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            }
        },
    )


def _as_chunk(delta: Delta) -> GenerationChunk:
    info = {"finish_reason": delta.finish_reason} if delta.finish_reason else None
    return GenerationChunk(text=delta.text, generation_info=info)
