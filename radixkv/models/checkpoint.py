"""A checkpoint by its name: whether there is one, and which options it is loaded with."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from radixkv.config import KV_DTYPES, BeamParams, KVConfig, SamplingParams
from radixkv.errors import UnknownOptionError, UnsupportedModelError
from radixkv.names import (
    BEAM_MEANINGS,
    ENGINE_MEANINGS,
    KV_MEANINGS,
    SAMPLING_MEANINGS,
    meaning,
    require_known,
)

# Names that mean something of ours, and that transformers takes too: of a model's own config, or
# of its way to load one. They go there.
SHARED_NAMES = frozenset(
    {
        "block_size",
        "context_length",
        "dtype",
        "eos_token_id",
        "generation_config",
        "max_memory",
        "n_ctx",
        "num_blocks",
        "seed",
        "suppress_tokens",
        "use_cache",
    }
)


def _engine_meanings() -> dict[str, str]:
    """What is meant by a name that an engine does not take: its own, of its pages, of requests."""
    requests = [*fields(SamplingParams), *fields(BeamParams)]
    return {
        **{name: f"{said}, of a request" for name, said in BEAM_MEANINGS.items()},
        **{name: f"{said}, of a request" for name, said in SAMPLING_MEANINGS.items()},
        **{
            field.name: f"is an option of a request: generate(prompt, {field.name}=...)"
            for field in requests
        },
        **{name: f"{said}, of kv=KVConfig(...)" for name, said in KV_MEANINGS.items()},
        **{
            field.name: f"is a field of KVConfig: kv=KVConfig({field.name}=...)"
            for field in fields(KVConfig)
        },
        **ENGINE_MEANINGS,
    }


_OWN = ("backend", "device", "max_batch_tokens")
ENGINE_OPTIONS = {name: said for name, said in _engine_meanings().items() if name not in _OWN}


def require_options(where: str, given: Mapping[str, Any], ours: list[str]) -> None:
    """Raise UnknownOptionError for what is surely meant for us and not for transformers.

    Args:
        given: keywords that are to go to transformers.
        ours: the names that ``where`` takes itself.
    """
    mine = set(ENGINE_OPTIONS) - SHARED_NAMES
    require_known(where, [name for name in given if name in mine], ours, ENGINE_OPTIONS)
    for name in ("output_loading_info", "return_unused_kwargs"):
        if given.get(name):
            raise UnknownOptionError(
                f"{where}: expected options that leave a model to serve, got {name!r}, which "
                f"gives more than one thing; load the model with transformers and pass it to Engine"
            )


def require_checkpoint(name_or_path: object, options: Mapping[str, Any]) -> None:
    """Raise unless the name may lead to a checkpoint: a folder with one, or the form of a hub id.

    Raises:
        TypeError: neither a str nor a path.
        ValueError: a path that leads nowhere, to a file, or to a folder without a model.
    """
    name = "name_or_path"
    expected = "the folder of a transformers causal LM, or its hub id"
    if not isinstance(name_or_path, (str, os.PathLike)):
        said = type(name_or_path).__name__
        mend = "; pass a model that is loaded to Engine(model)" if said.endswith("LM") else ""
        raise TypeError(f"{name}: expected {expected}, got {said}{mend}")
    text = os.fspath(name_or_path)
    if not text or not isinstance(text, str):
        raise ValueError(f"{name}: expected {expected}, got {text!r}")
    path = Path(text)
    if not path.exists():
        if path.is_absolute() or text.startswith((".", "~")) or len(path.parts) > 2:
            mend = "write the home folder out" if text.startswith("~") else "check the path"
            raise ValueError(
                f"{name}: expected {expected}, got {text!r}; there is no such folder, {mend}"
            )
        return
    if path.is_file():
        mend = (
            f"pass {str(path.parent)!r} with gguf_file={path.name!r}"
            if path.suffix == ".gguf"
            else f"pass {str(path.parent)!r}"
        )
        raise ValueError(f"{name}: expected {expected}, got the file {text!r}; {mend}")
    folder = path / str(options.get("subfolder") or "")
    given_elsewhere = options.get("gguf_file") or options.get("config")
    if not given_elsewhere and not any(
        (folder / file).is_file() for file in ("config.json", "adapter_config.json")
    ):
        found = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        gguf = next((entry for entry in found if entry.endswith(".gguf")), None)
        mend = (
            f"add gguf_file={gguf!r}" if gguf else "save a model there with model.save_pretrained"
        )
        raise ValueError(
            f"{name}: expected {expected}, got {text!r}, which has no config.json; {mend}"
        )


def require_device(device: object) -> None:
    """Raise ValueError or TypeError unless ``device`` names a device that is there."""
    if device is None or device == "auto":
        return
    expected = '"auto", or a device of torch that is there, such as "cpu" or "cuda:0"'
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device: expected {expected}, got {device!r}")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected {expected}, got {device!r}; {error}") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: expected {expected}, got {device!r}; torch sees "
            f"{torch.cuda.device_count()} GPUs here"
        )


def require_dtype(dtype: object) -> None:
    """Raise ValueError or TypeError unless ``dtype`` is one of torch's floating types."""
    expected = '"auto", or a floating dtype of torch such as "float32" or torch.bfloat16'
    if not isinstance(dtype, (str, torch.dtype)):
        raise TypeError(f"dtype: expected {expected}, got {dtype!r}")
    if dtype == "auto":
        return
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        mend = f"; of pages: kv=KVConfig(dtype={dtype!r})" if dtype in KV_DTYPES else ""
        raise ValueError(f"dtype: expected {expected}, got {dtype!r}{mend}")


@contextmanager
def named_refusals(where: str, name_or_path: object, ours: list[str]) -> Iterator[None]:
    """Within this block, transformers' refusal of an option or a model becomes an error of ours."""
    try:
        yield
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None:
            raise
        said = meaning(found[1], ours, ENGINE_OPTIONS) or "leave it out"
        raise UnknownOptionError(
            f"{where}: expected options of its own ({', '.join(ours)}), of transformers' "
            f"from_pretrained or of the model's config, got {found[1]!r}; {said}"
        ) from error
    except ValueError as error:
        found = re.match(r"Unrecognized configuration class <class '.*?(\w+)'>", str(error))
        if found is None:
            raise
        raise UnsupportedModelError(
            f"{name_or_path}: expected a causal LM, got a model of {found[1]}, which transformers "
            f"has none for; AutoModelForCausalLM lists those that it has"
        ) from error


def own_options(function: Any) -> list[str]:
    """The keywords that a function names itself, without those that it passes on."""
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
