"""Constrained output: which tokens may come next, so that a text follows a schema or grammar.

The work is done by the package `llguidance` (the extra ``guided``): a `Guide` is one sample's
state in it. Its state is the sample's own tokens alone, so it lives with the request and knows
nothing of pages.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.config import SamplingParams
from radixkv.errors import RadixKVError
from radixkv.text import tokenizer_lock

_KEPT_GRAMMARS = 32  # compiled grammars kept a vocabulary, the least recently used dropped
_MASK_BITS = 32
# At most one space between the parts of a JSON text: where any run of white space is allowed, a
# small model may fill its tokens with that. A schema's own "x-guidance" goes before this.
_JSON_DEFAULTS: Any = {"whitespace_pattern": " ?"}


class Guide:
    """Which tokens may come next in one sample; made by `make_guide`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self.vocab_size = vocab_size
        self._ahead: tuple[Future[None], Tensor] | None = None  # the mask that is being computed

    def fork(self) -> Guide:
        """A second guide in the same state; the two go on apart."""
        self._wait()
        return Guide(self._matcher.deep_copy(), self.vocab_size)

    @property
    def finished(self) -> bool:
        """Whether the text is whole and nothing may follow it."""
        self._wait()
        return bool(self._matcher.is_stopped())

    def advance(self, token_id: int) -> None:
        """Take the next token of the sample, one that may come next.

        Raises:
            RadixKVError: it may not, or the grammar has become too costly to follow.
        """
        self._wait()
        self._ahead = None
        if not self._matcher.consume_token(token_id):
            raise self._error(f"token {token_id}")

    def fill(self, mask: Tensor) -> None:
        """Write a bit for each token that may come next, the lowest bit for the lowest id.

        Args:
            mask: Shape [ceil(vocab / 32)] int32, contiguous, CPU; overwritten.
        Raises:
            RadixKVError: the grammar has become too costly to follow.
        """
        self._wait()
        if self._ahead is not None and self._ahead[0].exception() is None:
            mask.copy_(self._ahead[1])
        else:
            self._compute(mask)
        if self._matcher.is_error():
            raise self._error("the next token")

    def _compute(self, mask: Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)

    def _wait(self) -> None:
        # The matcher serves one thread at a time.
        if self._ahead is not None:
            wait([self._ahead[0]])

    def _error(self, what: str) -> RadixKVError:
        said = _first_line(self._matcher.get_error())
        return RadixKVError(
            f"constrained output: {what} cannot follow ({said}); make the schema or grammar simpler"
        )


def compute_ahead(guides: Sequence[Guide]) -> None:
    """Begin to compute which tokens may come next, on another thread, for `Guide.fill` to find.

    Called before the model runs, it has the masks ready when the logits come.
    """
    waiting = [guide for guide in guides if guide._ahead is None]
    if not waiting:
        return
    masks = torch.zeros(len(waiting), -(-waiting[0].vocab_size // _MASK_BITS), dtype=torch.int32)

    def compute() -> None:
        for guide, mask in zip(waiting, masks, strict=True):
            guide._compute(mask)

    future = _worker().submit(compute)
    for guide, mask in zip(waiting, masks, strict=True):
        guide._ahead = future, mask


def allowed_tokens(guides: Sequence[Guide], vocab_size: int, device: torch.device) -> Tensor:
    """Which tokens may come next, a row for each guide. [len(guides), vocab_size] bool.

    Complexity: no Python per entry of the vocabulary.
    """
    width = -(-vocab_size // _MASK_BITS)
    masks = torch.zeros(len(guides), width, dtype=torch.int32)
    for guide, mask in zip(guides, masks, strict=True):
        guide.fill(mask)
    # 64 rows of 49,152 entries: 0.2 ms so, 18 ms with shifts in torch.
    spread = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(spread[:, :vocab_size]).view(torch.bool).to(device)


def make_guide(
    params: SamplingParams, tokenizer: Any, *, vocab_size: int, eos_token_ids: Collection[int]
) -> Guide | None:
    """The guide that ``params`` ask for, at the beginning of a text; None if they ask for none.

    Compiled grammars are kept, so that asking again with the same one is cheap.

    Args:
        tokenizer: the model's; a fast one of transformers.
        vocab_size: entries in a row of logits.
        eos_token_ids: they may come where the text is whole.
    Raises:
        ValueError: a schema, regex or grammar that is not valid or not supported, or no such
            tokenizer, or no end token.
        RadixKVError: the package `llguidance` is not installed.
    """
    asked = params.constraint
    if asked is None:
        return None
    name = f"SamplingParams.{asked}"
    if tokenizer is None:
        raise ValueError(
            f"{name}: expected an engine with a tokenizer, got none; give it the model's own"
        )
    if not eos_token_ids:
        raise ValueError(
            f"{name}: expected a model with an end token, got none; set "
            f"model.generation_config.eos_token_id before the engine is made"
        )
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise RadixKVError(
            f"{name}: expected the package 'llguidance' to be installed, found none; "
            f"run: pip install 'radixkv[guided]'"
        ) from error
    value = getattr(params, asked)
    if asked == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(value), defaults=_JSON_DEFAULTS)
    elif asked == "regex":
        grammar = LLMatcher.grammar_from_regex(value)
    else:
        grammar = LLMatcher.grammar_from_lark(value)
    vocabulary = _vocabulary(tokenizer, vocab_size, tuple(sorted(eos_token_ids)), name)
    return vocabulary.guide(grammar, name, value)


class _Vocabulary:
    """A tokenizer's vocabulary as llguidance reads it, and grammars compiled for it."""

    def __init__(self, tokens: Any, vocab_size: int) -> None:
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Guide] = OrderedDict()

    def guide(self, grammar: str, name: str, value: object) -> Guide:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found.fork()
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        said = " ".join(matcher.get_error().split())
        made = Guide(matcher, self._vocab_size)
        if not said:
            try:  # whether anything may come first shows in the first mask alone
                allowed_tokens([made], self._vocab_size, torch.device("cpu"))
            except RadixKVError:
                said = "no text follows it"
        if said:
            raise ValueError(
                f"{name}: expected one that can be followed, got {value!r}; llguidance says: {said}"
            )
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > _KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return made.fork()


_workers: list[ThreadPoolExecutor] = []  # at most one, made when it is first needed
_workers_lock = threading.Lock()


def _worker() -> ThreadPoolExecutor:
    with _workers_lock:
        if not _workers:
            _workers.append(ThreadPoolExecutor(1, "radixkv-guides"))
        return _workers[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.clear)  # its thread is the parent's


_Key = tuple[int, tuple[int, ...]]
_vocabularies: weakref.WeakKeyDictionary[Any, dict[_Key, _Vocabulary]]
_vocabularies = weakref.WeakKeyDictionary()


def _vocabulary(
    tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...], name: str
) -> _Vocabulary:
    from llguidance.hf import from_tokenizer

    with tokenizer_lock(tokenizer):  # also keeps a second thread from building the same
        made = _vocabularies.setdefault(tokenizer, {})
        key = (vocab_size, eos_token_ids)
        if key not in made:
            try:
                tokens = from_tokenizer(
                    tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids)
                )
            except ValueError as error:
                raise ValueError(
                    f"{name}: expected a fast tokenizer whose vocabulary fits the model's "
                    f"{vocab_size} logits, got {type(tokenizer).__name__} ({_first_line(error)})"
                ) from error
            made[key] = _Vocabulary(tokens, vocab_size)
        return made[key]


def _first_line(said: object) -> str:
    return (str(said).strip().splitlines() or ["no reason given"])[0]
