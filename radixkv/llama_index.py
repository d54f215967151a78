"""An engine as a LlamaIndex LLM: `RadixKVLLM`; needs `llama-index-core` (extra `llama-index`).

Everything runs in this process, on the caller's engine: calls that are made at the same time,
from threads or asyncio, are one batch of the engine and share what is cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from pydantic import Field, InstanceOf

from radixkv.config import SamplingParams
from radixkv.engine import Engine
from radixkv.request import Result


class RadixKVLLM(CustomLLM):
    """Completions, and chats by the model's own template, on an `Engine` that the caller made.

    Every call takes ``stop=[...]`` and the other fields of `SamplingParams` as keywords, which
    replace those of ``params``; of several samples the first is returned.

    A response's ``raw`` is the `Result` (of a stream: the `Delta`). Its ``additional_kwargs``
    count ``prompt_tokens``, ``cached_tokens``, ``completion_tokens``, ``total_tokens`` and say
    the ``finish_reason``. Of a stream the last response has them, of an asynchronous one the
    ``finish_reason`` alone.

    Attributes:
        engine: what runs the prompts; it needs a tokenizer.
        params: how tokens are drawn and when a text ends.
        namespace: whose cache the prompts use; None is the common one.
    """

    engine: InstanceOf[Engine] = Field(exclude=True)
    params: InstanceOf[SamplingParams] = Field(default=SamplingParams(), exclude=True)
    namespace: Hashable = Field(default=None, exclude=True)

    @classmethod
    def class_name(cls) -> str:
        """The name that LlamaIndex knows this class by."""
        return "radixkv_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """The model's context length, name, and whether it has a chat template."""
        engine = self.engine
        pool_tokens = engine.cache.pool.num_pages * engine.cache.config.page_size
        return LLMMetadata(
            context_window=min(engine.max_positions or pool_tokens, pool_tokens),
            num_output=self.params.max_new_tokens,
            is_chat_model=bool(getattr(engine.tokenizer, "chat_template", None)),
            model_name=engine.model.config.name_or_path or engine.model.config.model_type,
        )

    def _ask(self, prompt: Any, fields: dict[str, Any]) -> tuple[Any, SamplingParams]:
        return prompt, dataclasses.replace(self.params, **fields)

    def _completion(self, prompt: str, formatted: bool) -> str:
        return prompt if formatted else str(self.completion_to_prompt(prompt))

    # -- completions -------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The text that follows ``prompt``."""
        asked = self._ask(self._completion(prompt, formatted), kwargs)
        result = self.engine.generate(*asked, namespace=self.namespace)
        return CompletionResponse(text=result.text, raw=result, additional_kwargs=_usage(result))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """`complete` for asyncio; cancelling the task aborts it."""
        asked = self._ask(self._completion(prompt, formatted), kwargs)
        result = await self.engine.agenerate(*asked, namespace=self.namespace)
        return CompletionResponse(text=result.text, raw=result, additional_kwargs=_usage(result))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """`complete`, as its text comes; closing the generator aborts it."""
        asked = self._ask(self._completion(prompt, formatted), {**kwargs, "n": 1})

        def responses() -> CompletionResponseGen:
            text = ""
            with self.engine.stream(*asked, namespace=self.namespace) as deltas:
                for delta in deltas:
                    text += delta.text
                    usage = _usage(deltas.request.result()) if delta.finish_reason else {}
                    yield CompletionResponse(
                        text=text, delta=delta.text, raw=delta, additional_kwargs=usage
                    )

        return responses()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """`stream_complete` for asyncio."""
        asked = self._ask(self._completion(prompt, formatted), {**kwargs, "n": 1})

        async def responses() -> CompletionResponseAsyncGen:
            text = ""
            async for delta in self.engine.astream(*asked, namespace=self.namespace):
                text += delta.text
                usage = {"finish_reason": delta.finish_reason} if delta.finish_reason else {}
                yield CompletionResponse(
                    text=text, delta=delta.text, raw=delta, additional_kwargs=usage
                )

        return responses()

    # -- chats -------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """The assistant's next turn."""
        result = self.engine.generate(
            *self._ask(_as_chat(messages), kwargs), namespace=self.namespace
        )
        return _as_turn(result.text, raw=result, additional_kwargs=_usage(result))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` for asyncio; cancelling the task aborts it."""
        result = await self.engine.agenerate(
            *self._ask(_as_chat(messages), kwargs), namespace=self.namespace
        )
        return _as_turn(result.text, raw=result, additional_kwargs=_usage(result))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat`, as its text comes; closing the generator aborts it."""
        asked = self._ask(_as_chat(messages), {**kwargs, "n": 1})

        def responses() -> ChatResponseGen:
            text = ""
            with self.engine.stream(*asked, namespace=self.namespace) as deltas:
                for delta in deltas:
                    text += delta.text
                    usage = _usage(deltas.request.result()) if delta.finish_reason else {}
                    yield _as_turn(text, delta=delta.text, raw=delta, additional_kwargs=usage)

        return responses()

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """`stream_chat` for asyncio."""
        asked = self._ask(_as_chat(messages), {**kwargs, "n": 1})

        async def responses() -> ChatResponseAsyncGen:
            text = ""
            async for delta in self.engine.astream(*asked, namespace=self.namespace):
                text += delta.text
                usage = {"finish_reason": delta.finish_reason} if delta.finish_reason else {}
                yield _as_turn(text, delta=delta.text, raw=delta, additional_kwargs=usage)

        return responses()


def _as_chat(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [{"role": m.role.value, "content": m.content or ""} for m in messages]


def _as_turn(text: str, **fields: Any) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, **fields)


def _usage(result: Result) -> dict[str, Any]:
    prompt_tokens = len(result.prompt_token_ids)
    completion_tokens = sum(len(sample.token_ids) for sample in result.samples)
    return {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "finish_reason": result.samples[0].finish_reason,
    }
