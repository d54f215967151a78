"""What the integrations share: options of their constructors, and keys for caches of answers."""

from __future__ import annotations

import dataclasses
import json
import threading
import uuid
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import xxhash

from radixkv.config import SamplingParams
from radixkv.engine.engine import Engine
from radixkv.models.fingerprint import fingerprint
from radixkv.models.weight_watch import WeightWatch
from radixkv.names import SAMPLING_MEANINGS, require_known
from radixkv.text import tokenizer_lock

_SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]

# What users of other adapters give to a constructor, and what is said of it.
ADAPTER_MEANINGS = SAMPLING_MEANINGS | {
    **dict.fromkeys(
        ("model", "model_name", "model_id", "model_path", "pretrained", "pipeline", "llm"),
        'is engine=Engine.from_pretrained("folder or hub id")',
    ),
    **dict.fromkeys(
        ("model_kwargs", "generate_kwargs", "pipeline_kwargs", "additional_kwargs"),
        "is given field by field, as temperature=0.2",
    ),
    **dict.fromkeys(
        ("kv", "capacity", "page_size", "tokenizer", "device", "dtype"),
        "is an option of the engine; make the engine with it",
    ),
    **dict.fromkeys(
        ("context_window", "n_ctx", "max_model_len"), "is what the model's config says"
    ),
    "streaming": "is llm.stream(...)",
}


def merge_params(where: str, given: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """A constructor's keywords, with those that are fields of `SamplingParams` put into ``params``.

    They replace fields of the ``params`` that were given, or of the default ones.

    Args:
        where: the class that errors speak of.
        own: fields of the class itself.
    Raises:
        UnknownOptionError: neither a field of the class nor of `SamplingParams`.
        TypeError, ValueError: as `SamplingParams`.
    """
    names = [*own, *(name for name in _SAMPLING if name not in own)]
    require_known(where, given, names, ADAPTER_MEANINGS)
    fields = {name: value for name, value in given.items() if name in own}
    sampling = {name: value for name, value in given.items() if name not in own}
    params = fields.pop("params", None)
    if params is None:
        params = SamplingParams()
    if not isinstance(params, SamplingParams):
        raise TypeError(
            f"{where}.params: expected SamplingParams, got {params!r} of type "
            f"{type(params).__name__}; give SamplingParams, or its fields one by one"
        )
    fields["params"] = dataclasses.replace(params, **sampling)
    return fields


def one_sample(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a call that streams, with the one sample that a stream takes.

    Raises:
        ValueError: the call itself asks for more.
    """
    if fields.get("n", 1) not in (1, None):
        raise ValueError(
            f"n: expected 1 for a stream, got {fields['n']!r}; call without streaming for more"
        )
    return {**fields, "n": 1}


class _Model:
    """A lasting name for one engine's model; another one after the model was changed."""

    def __init__(self, engine: Engine) -> None:
        self._lock = threading.Lock()
        self._model, self._tokenizer = engine.model, engine.tokenizer
        self._watch = WeightWatch(engine.model)
        self._mark = uuid.uuid4().hex
        self._digest: str | None = None

    def name(self, *, lasting: bool) -> str:
        with self._lock:
            if self._watch.changed():
                self._mark, self._digest = uuid.uuid4().hex, None
            if not lasting:
                return self._mark
            if self._digest is None:
                parts = fingerprint(self._model, self._tokenizer)
                parts["tokenizer.rules"] = _tokenizer_rules(self._tokenizer)
                text = json.dumps(parts, sort_keys=True)
                self._digest = xxhash.xxh3_128_hexdigest(text.encode())
            return self._digest


_models: weakref.WeakKeyDictionary[Engine, _Model] = weakref.WeakKeyDictionary()
_models_lock = threading.Lock()


def answer_key(
    engine: Engine, params: SamplingParams, namespace: object, *, lasting: bool
) -> dict[str, str]:
    """All that an answer depends on beside its prompt, as text: the key of a cache of answers.

    Two engines of the same model, pages and tokenizer have one key, in another process too. What
    cannot be named (logits processors, namespaces that are objects) makes a key that is never
    met again, so that no answer is taken for another's.

    Args:
        lasting: name the model by every byte of its weights, which is read once; else by a mark
            that holds as long as the engine, at no cost.

    Complexity: O(tensors + modules), a look whether the model was changed.
    """
    with _models_lock:
        model = _models.get(engine)
        if model is None:
            model = _models[engine] = _Model(engine)
    config = engine.model.config
    key = {
        "model": str(config.name_or_path or config.model_type),
        "fingerprint": model.name(lasting=lasting),
        "kv": repr(engine.cache.config),
        "backend": f"{engine.cache.backend.name} on {engine.cache.device}",
        "eos_token_ids": repr(sorted(engine.eos_token_ids)),
        "namespace": repr(namespace),
        "params": repr(params),
    }
    if params.logits_processors or not _has_a_name(namespace):
        key["only_once"] = uuid.uuid4().hex
    return key


def _has_a_name(value: object) -> bool:
    """Whether equal texts of ``repr`` mean equal values."""
    if isinstance(value, tuple):
        return all(map(_has_a_name, value))
    return value is None or type(value) in (str, bytes, int, float, bool)


def _tokenizer_rules(tokenizer: Any) -> str:
    """A digest of how a tokenizer splits and joins, and of its chat template."""
    if tokenizer is None:
        return ""
    rules: dict[str, Any] = {"chat_template": repr(getattr(tokenizer, "chat_template", None))}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        with tokenizer_lock(tokenizer):
            rules |= json.loads(backend.to_str())
        rules.pop("truncation", None)  # these two are set anew by each call
        rules.pop("padding", None)
    return xxhash.xxh3_128_hexdigest(json.dumps(rules, sort_keys=True).encode())
