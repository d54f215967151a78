"""An engine as a LlamaIndex LLM: `RadixKVLLM`; needs `llama-index-core` (extra `llama-index`).

Everything runs in this process, on the caller's engine: calls that are made at the same time,
from threads or asyncio, are one batch of the engine and share what is cached.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_prompt
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from pydantic import Field, InstanceOf, computed_field

from radixkv.config import SamplingParams
from radixkv.engine.engine import Engine
from radixkv.engine.results import Result
from radixkv.integrations.common import answer_key, merge_params, one_sample


class RadixKVLLM(CustomLLM):
    """Completions, and chats by the model's own template, on an `Engine` that the caller made.

    ``RadixKVLLM(engine=engine, temperature=0.2)``: fields of `SamplingParams` go into ``params``,
    and replace those of ``params`` where both are given. Every call takes ``stop=[...]`` and the
    other fields of `SamplingParams` as keywords, which replace those of ``params``; of several
    samples the first is returned. Other names raise `UnknownOptionError`.

    Of a chat's messages the template gets texts, tool calls and the ids they are answered by,
    thoughts, and what else it has a name for. What it has none for, and blocks that are no text,
    raise ValueError that names the kind: nothing is left out. A `CachePoint` asks for what is
    done in any case. ``messages_to_prompt=``, where it is given, is used instead of the template.

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

    def __init__(self, **fields: Any) -> None:
        super().__init__(**merge_params(type(self).__name__, fields, type(self).model_fields))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def answer_key(self) -> dict[str, str]:
        """All that an answer depends on: LlamaIndex's caches are keyed by what `to_dict` holds."""
        return answer_key(self.engine, self.params, self.namespace, lasting=False)

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

    def _chat(self, messages: Sequence[ChatMessage]) -> Any:
        if self.messages_to_prompt not in (None, generic_prompt):
            return str(self.messages_to_prompt(messages))
        template = str(getattr(self.engine.tokenizer, "chat_template", ""))
        return [_as_message(message, i, template) for i, message in enumerate(messages)]

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
        asked = self._ask(self._completion(prompt, formatted), one_sample(kwargs))

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
        asked = self._ask(self._completion(prompt, formatted), one_sample(kwargs))

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
            *self._ask(self._chat(messages), kwargs), namespace=self.namespace
        )
        return _as_turn(result.text, raw=result, additional_kwargs=_usage(result))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` for asyncio; cancelling the task aborts it."""
        result = await self.engine.agenerate(
            *self._ask(self._chat(messages), kwargs), namespace=self.namespace
        )
        return _as_turn(result.text, raw=result, additional_kwargs=_usage(result))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """`chat`, as its text comes; closing the generator aborts it."""
        asked = self._ask(self._chat(messages), one_sample(kwargs))

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
        asked = self._ask(self._chat(messages), one_sample(kwargs))

        async def responses() -> ChatResponseAsyncGen:
            text = ""
            async for delta in self.engine.astream(*asked, namespace=self.namespace):
                text += delta.text
                usage = {"finish_reason": delta.finish_reason} if delta.finish_reason else {}
                yield _as_turn(text, delta=delta.text, raw=delta, additional_kwargs=usage)

        return responses()


# How templates call a turn's thoughts.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Fields of a tool's answer: a template for tool calls either reads them or goes by the order.
_OF_ANSWERS = ("tool_call_id", "name")


def _as_message(message: ChatMessage, position: int, template: str) -> dict[str, Any]:
    """A message as chat templates take it.

    Args:
        template: source of the chat template; a field that is not in it would be lost.
    """

    def refuse(what: str, mend: str) -> NoReturn:
        raise ValueError(
            f"messages: expected text, and what the model's chat template has a place for, got "
            f"{what} in message {position} ({message.role.value}); {mend}"
        )

    def knows(name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", template) is not None

    texts, calls, thoughts = [], [], []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolCallBlock):
            calls.append(_as_call(block.tool_call_id, block.tool_name, block.tool_kwargs))
        elif isinstance(block, ThinkingBlock):
            thoughts += [block.content] if block.content else []
        elif not isinstance(block, CachePoint):
            refuse(f"a block of type {block.block_type!r}", "leave it out or say it in text")
    said: dict[str, Any] = {"role": message.role.value, "content": "\n".join(texts)}
    fields = {name: value for name, value in message.additional_kwargs.items() if value}
    for given in fields.pop("tool_calls", ()):
        call = _read_call(given)
        if call is None:
            refuse(f"a tool call {given!r}", "give ToolCallBlock(tool_name=..., tool_kwargs=...)")
        if call["id"] is None or call["id"] not in [other["id"] for other in calls]:
            calls.append(call)
    if calls:
        if not knows("tool_calls"):
            refuse("tool calls (tool_call)", "use a model whose template knows tools")
        said["tool_calls"] = [{k: v for k, v in call.items() if v is not None} for call in calls]
    if thoughts:
        name = next(filter(knows, _THOUGHTS), None)
        if name is None:
            refuse("a block of type 'thinking'", "leave it out")
        said[name] = "\n".join(thoughts)
    for name, value in fields.items():
        is_answers = message.role == MessageRole.TOOL and name in _OF_ANSWERS
        if not knows(name) and not (is_answers and knows("tool_calls")):
            refuse(f"additional_kwargs[{name!r}]", "leave it out or say it in text")
        said[name] = value
    return said


def _as_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):  # as OpenAI has them; templates want the mapping
        try:
            read = json.loads(arguments)
        except ValueError:
            read = None
        arguments = read if isinstance(read, dict) else arguments
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _read_call(given: Any) -> dict[str, Any] | None:
    """A call as OpenAI's clients leave it in ``additional_kwargs``; None if it is none."""
    if hasattr(given, "model_dump"):
        given = given.model_dump()
    if not isinstance(given, Mapping):
        return None
    function = given.get("function", given)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    return _as_call(given.get("id"), function["name"], function.get("arguments", {}))


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
