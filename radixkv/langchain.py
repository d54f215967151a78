"""An engine as a LangChain LLM: `RadixKVLLM`; needs `langchain-core` alone (extra `langchain`).

Everything runs in this process, on the caller's engine: the prompts of a batch, and of calls
that are made at the same time, are one batch of the engine and share what is cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Hashable, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import Field, InstanceOf

from radixkv.config import SamplingParams
from radixkv.engine import Engine
from radixkv.request import Delta, Result
from radixkv.text import encode_continuation


class RadixKVLLM(BaseLLM):
    """Text in, text out, on an `Engine` that the caller made and closes.

    Every call takes ``stop=[...]``, which replaces ``params.stop``, and fields of
    `SamplingParams` as keywords, which replace those of ``params``. With ``n`` above 1 a prompt
    gives ``n`` generations; a stream takes one sample.

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

    @property
    def _llm_type(self) -> str:
        return "radixkv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        # LangChain's own response cache is keyed by these: all that changes an answer.
        return {
            "model": self.engine.model.config.name_or_path,
            "kv": repr(self.engine.cache.config),
            "params": repr(self.params),
        }

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of ``text`` by the engine's tokenizer, without special tokens."""
        if not text:
            return []
        engine = self.engine
        return encode_continuation(engine.tokenizer, text, after=(), vocab_size=engine.vocab_size)

    def _sampling(self, stop: list[str] | None, fields: dict[str, Any]) -> SamplingParams:
        if stop is not None:
            fields = {**fields, "stop": tuple(stop)}
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
        params = self._sampling(stop, {**kwargs, "n": 1})
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
        params = self._sampling(stop, {**kwargs, "n": 1})
        async for delta in self.engine.astream(prompt, params, namespace=self.namespace):
            chunk = _as_chunk(delta)
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


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
