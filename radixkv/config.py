"""Options: frozen, keyword-only, checked when they are made; no torch here."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypedDict,
    TypeGuard,
    TypeVar,
    cast,
    get_args,
)

from radixkv import kv_formats
from radixkv.names import BEAM_MEANINGS, KV_MEANINGS, SAMPLING_MEANINGS, named_fields

# Choices, once: the aliases for type checkers, the tuples for checks and messages. Formats stand in
# `radixkv.kv_formats`; what type checkers read of them is written out (tested to be the same).
KVDtype: TypeAlias = Literal["int8", "fp8", "fp8_e5m2", "int4", "model"]
Rotation: TypeAlias = Literal["auto", "hadamard", "none"]
Eviction: TypeAlias = Literal["lru", "lfu", "priority"]
SharedPrefix: TypeAlias = Literal["auto", "always", "never"]
BackendName: TypeAlias = Literal["auto", "triton", "cpu", "torch"]
OnError: TypeAlias = Literal["raise", "return"]

KV_DTYPES = cast("tuple[KVDtype, ...]", tuple(kv_formats.FORMATS))
ROTATIONS: tuple[Rotation, ...] = get_args(Rotation)
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
SHARED_PREFIX: tuple[SharedPrefix, ...] = get_args(SharedPrefix)
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

Choice = TypeVar("Choice", bound=str)

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{u}i": 1024 ** (i + 1) for i, u in enumerate("kmgt")}


def parse_bytes(value: int | str, *, name: str = "capacity") -> int:
    """Turn a byte count or a text such as ``"512MiB"`` into bytes.

    Raises:
        TypeError: neither an int nor a str.
        ValueError: text of another form, or a count below 1.

    >>> parse_bytes("512MiB"), parse_bytes("4GB"), parse_bytes(1000)
    (536870912, 4000000000, 1000)
    """
    form = 'a positive number of bytes, or text such as "512MiB" or "4GB"'
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, (Integral, str)):
        raise TypeError(f"{name}: expected {form}, got {value!r} of type {type(value).__name__}")
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", value.lower())
        if found is None:
            raise ValueError(f"{name}: expected {form}, got {value!r}")
        num_bytes = int(Fraction(found[1]) * _UNITS[found[2] or ""])
    else:
        num_bytes = int(value)
    if num_bytes < 1:
        raise ValueError(f"{name}: expected {form}, got {value!r}")
    return num_bytes


def require_choice(name: str, value: object, choices: Sequence[Choice]) -> Choice:
    """Return ``value`` if it is one of ``choices``; else ValueError, which lists them."""
    if isinstance(value, str) and value in choices:
        return value  # type: ignore[return-value]
    like: list[str] = []
    if isinstance(value, str):
        plain = value.lower().replace("-", "_")
        like = difflib.get_close_matches(_ALIASES.get(plain, plain), choices, n=1)
    raise ValueError(
        f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}"
        + (f"; did you mean {like[0]!r}?" if like else "")
    )


# What other libraries call some of our choices.
_ALIASES = {
    **{other: one.name for one in kv_formats.FORMATS.values() for other in one.other_names},
    "cuda": "triton",
    "eager": "torch",
}


def _plain(value: Any) -> Any:
    """A number of NumPy or torch, with no dimensions, as Python's own; anything else as it is."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def require_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int within [low, high]; TypeError or ValueError otherwise.

    Numbers of NumPy and torch that have no dimensions are taken too.
    """
    limits = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected {limits}, got {value!r} of type {type(value).__name__}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}: expected {limits}, got {value!r}")
    return number


def require_real(
    name: str, value: object, low: float, high: float = math.inf, *, above: bool = False
) -> float:
    """Return ``value`` as a finite float within [low, high] ((low, high] if ``above``)."""
    edge = f"> {low}" if above else f">= {low}"
    limits = f"a finite number {edge}" + ("" if high == math.inf else f" and <= {high}")
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected {limits}, got {value!r} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number > high or number < low or (above and number == low):
        raise ValueError(f"{name}: expected {limits}, got {value!r}")
    return number


def require_bool(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{name}: expected True or False, got {value!r} of type {type(value).__name__}"
        )


def require_unicode(name: str, text: str) -> None:
    """Raise ValueError if ``text`` holds a lone surrogate, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected text, got the lone surrogate {text[error.start]!r} at position "
            f"{error.start}; decode the text with errors='replace'"
        ) from error


def require_namespace(namespace: object) -> None:
    """Raise TypeError unless ``namespace`` can be looked up."""
    try:
        hash(namespace)
    except TypeError as error:
        raise TypeError(
            f"namespace: expected something hashable (a str, int or tuple of these), got "
            f"{namespace!r} of type {type(namespace).__name__}"
        ) from error


def _store(params: object, name: str, value: object) -> None:
    """Put what was checked into a field of a frozen dataclass."""
    object.__setattr__(params, name, value)


@named_fields(KV_MEANINGS)
@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """How KV pages are stored, how many there are, and which are dropped first.

    Attributes:
        dtype: storage format of K (and of V unless ``v_dtype`` says otherwise): ``"int8"``,
            ``"fp8"`` (e4m3), ``"fp8_e5m2"``, ``"int4"`` or ``"model"`` (not quantized).
        page_size: tokens a page; a power of two from 1 to 256.
        capacity: bytes for KV pages, an int or text such as ``"512MiB"``. ``None``: a quarter
            of the device memory that is free when the cache is made.
        rotate: ``"hadamard"`` rotates K and V per head before they are quantized, ``"none"``
            does not, ``"auto"`` rotates the formats that it was measured to help (all but
            ``"model"``).
        v_dtype: storage format of V, when it is not that of K.
        eviction: which cached tail goes first: ``"lru"``, ``"lfu"`` or ``"priority"``.
        pin_share: the largest share of the pages that pins may hold, above 0, at most 1.
        shared_prefix: read pages that several sequences share once a step: ``"auto"`` where
            it pays, ``"always"``, ``"never"``.
    """

    dtype: KVDtype = "int8"
    page_size: int = 16
    capacity: int | str | None = None
    rotate: Rotation = "auto"
    v_dtype: KVDtype | None = None
    eviction: Eviction = "lru"
    pin_share: float = 0.5
    shared_prefix: SharedPrefix = "auto"

    def __post_init__(self) -> None:
        require_choice("KVConfig.dtype", self.dtype, KV_DTYPES)
        _store(self, "page_size", require_int("KVConfig.page_size", self.page_size, 1, 256))
        if self.page_size & (self.page_size - 1):
            raise ValueError(
                f"KVConfig.page_size: expected a power of two from 1 to 256, got {self.page_size}"
            )
        if self.capacity is not None:
            parse_bytes(self.capacity, name="KVConfig.capacity")
        require_choice("KVConfig.rotate", self.rotate, ROTATIONS)
        if self.v_dtype is not None:
            require_choice("KVConfig.v_dtype", self.v_dtype, KV_DTYPES)
        require_choice("KVConfig.eviction", self.eviction, EVICTIONS)
        share = require_real("KVConfig.pin_share", self.pin_share, 0.0, 1.0, above=True)
        _store(self, "pin_share", share)
        require_choice("KVConfig.shared_prefix", self.shared_prefix, SHARED_PREFIX)


def _require_ids(name: str, value: object) -> tuple[int, ...]:
    value = () if value is None else _plain(value)
    if isinstance(value, Integral):
        value = (value,)
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        value = value.tolist()
    elif isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)  # of a set, in one order
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        raise TypeError(f"{name}: expected token ids, as a list, got {value!r}")
    return tuple(require_int(name, token_id, 0) for token_id in value)


def _require_biases(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: expected a mapping of token id to bias, got {type(value).__name__}"
        )
    biases = {}
    for token_id, bias in value.items():
        is_text = isinstance(token_id, str) and token_id.isdecimal() and len(token_id) < 20
        own_id = require_int(name, int(token_id) if is_text else token_id, 0)
        biases[own_id] = require_real(f"{name}[{token_id}]", bias, -math.inf)
    return biases


def _require_stops(name: str, value: object) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not _is_list(stops) or any(not isinstance(s, str) for s in stops):
        raise TypeError(f"{name}: expected a string or strings, got {value!r}")
    if any(not s for s in stops):
        raise ValueError(f"{name}: expected strings that are not empty, got {value!r}")
    for text in stops:
        require_unicode(name, text)
    return tuple(map(str, stops))


def _require_callables(name: str, value: object) -> tuple[Callable[..., Any], ...]:
    callables = () if value is None else value
    if not _is_list(callables) or any(not callable(one) for one in callables):
        raise TypeError(f"{name}: expected a sequence of callables, got {value!r}")
    return tuple(callables)


def _exact_int(digits: str) -> int:
    # llguidance reads the numbers of a schema as float64 and would follow a neighbour of these.
    number = int(digits)
    if abs(number) > 2**53:
        raise ValueError(f"integers in it must be from -2**53 to 2**53, not {digits}")
    return number


def _require_json_schema(name: str, value: Any) -> dict[str, Any]:
    """Return ``value`` as a mapping of its own, made of what JSON has; not checked as a schema."""
    expected = "a JSON schema: a mapping, True, the JSON text of one, or a pydantic model"
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        text = value
    elif isinstance(value, (Mapping, bool)):
        try:
            text = json.dumps(dict(value) if isinstance(value, Mapping) else value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: expected {expected}, got {value!r}; {error}") from error
        except RecursionError as error:
            raise ValueError(f"{name}: expected {expected}, got one nested too deeply") from error
    else:
        raise TypeError(f"{name}: expected {expected}, got {value!r} of {type(value).__name__}")
    try:
        schema = json.loads(text, parse_int=_exact_int)
    except ValueError as error:
        raise ValueError(f"{name}: expected {expected}, got {value!r}; {error}") from error
    except RecursionError as error:
        raise ValueError(f"{name}: expected {expected}, got one nested too deeply") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    require_unicode(name, json.dumps(schema, ensure_ascii=False))
    return schema


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


class Number(NamedTuple):
    """The range of a field that is a number.

    Attributes:
        low, high: its ends; ``high`` None is without end.
        above: ``low`` itself is not in it.
        whole: it is an int, else a float.
        none: what None stands for, if it may be given; "None" is None itself.
    """

    low: float
    high: float | None = None
    above: bool = False
    whole: bool = False
    none: float | Literal["None"] | None = None

    def check(self, name: str, value: object) -> float | int:
        """Return ``value`` as a number of this range; TypeError or ValueError otherwise."""
        if self.whole:
            return require_int(name, value, int(self.low), self.high)  # type: ignore[arg-type]
        high = math.inf if self.high is None else self.high
        return require_real(name, value, self.low, high, above=self.above)


def _store_numbers(params: object, numbers: Mapping[str, Number]) -> None:
    """Check the fields of a frozen dataclass that are numbers, and put in what was checked."""
    for name, number in numbers.items():
        value = getattr(params, name)
        if value is None:
            if number.none == "None":
                continue
            value = number.none
        _store(params, name, number.check(f"{type(params).__name__}.{name}", value))


Role: TypeAlias = Literal["samples", "logits", "text", "draw", "end", "report"]
SAMPLING_ROLES: dict[str, Role] = {
    "n": "samples",
    "max_new_tokens": "end",
    "temperature": "draw",
    "top_p": "draw",
    "top_k": "draw",
    "min_p": "draw",
    "repetition_penalty": "logits",
    "presence_penalty": "logits",
    "frequency_penalty": "logits",
    "logit_bias": "logits",
    "seed": "draw",
    "stop": "end",
    "stop_token_ids": "end",
    "ignore_eos": "end",
    "logprobs": "report",
    "prompt_logprobs": "report",
    "skip_special_tokens": "report",
    "timeout_s": "end",
    "logits_processors": "logits",
    "json_schema": "text",
    "regex": "text",
    "grammar": "text",
}
"""What each field of `SamplingParams` has a say in; a field that is not here fails a test.

``"logits"``: they change a row's logits before the draw, unless they are as by default
(`SamplingParams.changes_logits`). ``"text"``: which texts there may be, at most one of them
(`SamplingParams.constraint`). ``"draw"``: which token is drawn of the logits. ``"end"``: when a
sample is over. ``"samples"``: how many there are. ``"report"``: what is said of them, and nothing
of what is drawn.
"""

_MOST_SEQUENCES = 1 << 16  # of one request; a page's owners are counted in 20 bits
SAMPLING_NUMBERS = {
    "n": Number(1, _MOST_SEQUENCES, whole=True, none=1),
    "max_new_tokens": Number(1, whole=True),
    "temperature": Number(0.0, none=1.0),
    "top_p": Number(0.0, 1.0, above=True, none=1.0),
    "top_k": Number(-1, whole=True, none=0),
    "min_p": Number(0.0, 1.0, none=0.0),
    "repetition_penalty": Number(0.0, above=True, none=1.0),
    "presence_penalty": Number(-2.0, 2.0, none=0.0),
    "frequency_penalty": Number(-2.0, 2.0, none=0.0),
    "seed": Number(-(2**63), 2**64 - 1, whole=True, none="None"),
    "logprobs": Number(0, whole=True, none="None"),
    "prompt_logprobs": Number(0, whole=True, none="None"),
    "timeout_s": Number(0.0, above=True, none="None"),
}
"""The ranges of `SamplingParams`; of any seed the exact ends, hence ints."""

_TEXT_FIELDS = tuple(name for name, role in SAMPLING_ROLES.items() if role == "text")


class SamplingFields(TypedDict, total=False):
    """The fields of `SamplingParams`, as keywords of `Engine.generate` and its like."""

    n: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool
    timeout_s: float | None
    logits_processors: Sequence[Callable[..., Any]]
    json_schema: Any
    regex: str | None
    grammar: str | None


@named_fields(SAMPLING_MEANINGS)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled; see the fields. ``temperature=0`` is greedy.

    Attributes:
        n: samples; all share the prompt's pages.
        max_new_tokens: most tokens to generate a sample.
        temperature: divides the logits; 0 takes the best token.
        top_p: smallest set of tokens whose probabilities reach this, above 0, at most 1.
        top_k: the k best tokens; 0 is all, and so is -1.
        min_p: tokens at least this share as likely as the best one, 0 to 1.
        repetition_penalty: as in CTRL: divides positive and multiplies negative logits of
            tokens seen in prompt or output; above 0, 1 is none.
        presence_penalty: subtracted from the logits of tokens in the output; -2 to 2.
        frequency_penalty: the same, times the number of occurrences; -2 to 2.
        logit_bias: token id to a value added to its logit; an id may be text, as JSON has it.
        seed: sample i of seed s is always the same tokens. None: differs from call to call.
        stop: strings that end a sample; never part of its text.
        stop_token_ids: ids that end a sample, beside the model's own end tokens.
        ignore_eos: do not end at the model's end tokens.
        logprobs: per generated token, this many best log-probabilities and its own.
        prompt_logprobs: the same per prompt token; the first has None.
        skip_special_tokens: leave special tokens out of the text.
        timeout_s: seconds after which the request ends with ``finish_reason="abort"``.
        logits_processors: callables ``(input_ids [1, n], logits [1, vocab]) -> logits``, as
            transformers defines them, applied in order before everything else.
        json_schema: the text is JSON that this schema allows (needs the extra ``guided``, as
            do the next two): a mapping, True for any JSON, the JSON text of these, or a
            pydantic model. At most one space comes between the parts of the text; another
            rule: ``{"x-guidance": {"whitespace_pattern": ...}}`` in the schema.
        regex: the whole text matches this (Rust's syntax: no look-around, no back-references).
        grammar: the whole text follows this grammar, in llguidance's variety of Lark.

    None, where the default is not None, stands for "none of it" and is taken for ``n`` (1),
    ``temperature``, ``top_p`` and ``repetition_penalty`` (1.0), ``top_k``, ``min_p`` and the other
    penalties (0), ``stop``, ``stop_token_ids`` and ``logits_processors`` (empty). Strings may be
    one, ids may be one, a set or an array.

    At most one of the last three. They bar tokens that cannot lead to such a text; end tokens
    come only where it is whole, and it ends (``"stop"``) where nothing may follow. A text that
    is cut short by ``max_new_tokens``, ``stop``, ``stop_token_ids`` or ``timeout_s`` need not be
    whole.
    """

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    timeout_s: float | None = None
    logits_processors: Sequence[Callable[..., Any]] = field(default=(), hash=False)
    json_schema: Any = field(default=None, hash=False)
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        _store_numbers(self, SAMPLING_NUMBERS)
        _store(self, "top_k", max(0, self.top_k))  # -1 as others say "all"
        require_bool("SamplingParams.ignore_eos", self.ignore_eos)
        require_bool("SamplingParams.skip_special_tokens", self.skip_special_tokens)
        if self.logit_bias is not None:
            _store(
                self, "logit_bias", _require_biases("SamplingParams.logit_bias", self.logit_bias)
            )
        _store(self, "stop", _require_stops("SamplingParams.stop", self.stop))
        ids = _require_ids("SamplingParams.stop_token_ids", self.stop_token_ids)
        _store(self, "stop_token_ids", ids)
        processors = _require_callables("SamplingParams.logits_processors", self.logits_processors)
        _store(self, "logits_processors", processors)
        self._check_text_fields()

    def _check_text_fields(self) -> None:
        if self.json_schema is not None:
            schema = _require_json_schema("SamplingParams.json_schema", self.json_schema)
            _store(self, "json_schema", schema)
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is None:
                continue
            if not isinstance(text, str):
                raise TypeError(
                    f"SamplingParams.{name}: expected a str, got {text!r} of type "
                    f"{type(text).__name__}"
                )
            require_unicode(f"SamplingParams.{name}", text)
        given = [name for name in _TEXT_FIELDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"SamplingParams: expected at most one of {', '.join(_TEXT_FIELDS)}, got "
                f"{' and '.join(given)}; leave the others None"
            )
        if given and self.ignore_eos:
            raise ValueError(
                f"SamplingParams.ignore_eos: expected False with {given[0]}, got True; the text "
                f"ends where it is whole"
            )

    @property
    def changes_logits(self) -> bool:
        """Whether a field of the role "logits" (`SAMPLING_ROLES`) is not as by default."""
        # What is empty is as good as the default.
        return any((getattr(self, name) or off) != off for name, off in _LOGITS_OFF.items())

    @property
    def constraint(self) -> str | None:
        """Which of ``json_schema``, ``regex`` and ``grammar`` is given; None if none is."""
        return next((name for name in _TEXT_FIELDS if getattr(self, name) is not None), None)


# What leaves the logits as they are: the defaults.
_LOGITS_OFF: dict[str, Any] = {
    name: getattr(SamplingParams, name) for name, role in SAMPLING_ROLES.items() if role == "logits"
}


_BEAM_NUMBERS = {
    "width": Number(1, _MOST_SEQUENCES, whole=True),
    "max_new_tokens": Number(1, whole=True),
    "length_penalty": Number(-math.inf, none=1.0),
    "timeout_s": Number(0.0, above=True, none="None"),
}


@named_fields(BEAM_MEANINGS)
@dataclass(frozen=True, kw_only=True)
class BeamParams:
    """Beam search as ``transformers`` ``generate(num_beams=width)`` defines it.

    Attributes:
        width: beams kept at each step.
        max_new_tokens: most tokens to generate a beam.
        length_penalty: score = sum of log-probabilities / (new tokens) ** length_penalty.
        early_stopping: True, False or "never", as transformers defines them.
        num_return: how many beams to return, best first; None is all ``width``.
        ignore_eos: beams never end at the model's end tokens.
        stop_token_ids: ids that end a beam, beside the model's own.
        skip_special_tokens: leave special tokens out of the text.
        timeout_s: seconds after which the request ends with ``finish_reason="abort"``.

    None is taken for ``length_penalty`` (1.0), ``early_stopping`` (False) and ``stop_token_ids``
    (empty) too.
    """

    width: int = 4
    max_new_tokens: int = 128
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = field(default=())
    skip_special_tokens: bool = True
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        _store_numbers(self, _BEAM_NUMBERS)
        if self.num_return is not None:
            number = require_int("BeamParams.num_return", self.num_return, 1, self.width)
            _store(self, "num_return", number)
        require_bool("BeamParams.ignore_eos", self.ignore_eos)
        require_bool("BeamParams.skip_special_tokens", self.skip_special_tokens)
        early = False if self.early_stopping is None else self.early_stopping
        if not isinstance(early, bool) and not (isinstance(early, str) and early == "never"):
            raise ValueError(
                f'BeamParams.early_stopping: expected True, False or "never", '
                f"got {self.early_stopping!r}"
            )
        _store(self, "early_stopping", early)
        ids = _require_ids("BeamParams.stop_token_ids", self.stop_token_ids)
        _store(self, "stop_token_ids", ids)
