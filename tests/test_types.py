"""Types: what mypy and pyright say of a user's file, against the README's own install."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import typing
import venv
from dataclasses import fields
from pathlib import Path

import pytest

from radixkv import KVConfig, SamplingFields, SamplingParams
from radixkv.config import (
    BACKENDS,
    EVICTIONS,
    KV_DTYPES,
    ROTATIONS,
    SAMPLING_NUMBERS,
    SAMPLING_ROLES,
    SHARED_PREFIX,
)

ROOT = Path(__file__).resolve().parent.parent

RIGHT = """\
import asyncio
from collections.abc import Iterator

import numpy as np
import torch

import radixkv
from radixkv import Chat, FinishReason, KVConfig, KVDtype, Prompt, SamplingFields, SamplingParams

dtype: KVDtype = "int4"
kv = KVConfig(dtype=dtype, eviction="lfu", rotate="none", shared_prefix="never")
engine = radixkv.Engine.from_pretrained("somewhere", kv=kv, backend="cpu")
chat: Chat = [{"role": "user", "content": "hi"}]
chats: list[Chat] = [chat]
texts: list[str] = ["a", "b"]
mixed: list[Prompt] = ["a", [1, 2], chat]
fields: SamplingFields = {"temperature": 0.0, "max_new_tokens": 4}

reveal_type(engine.generate("a", max_new_tokens=4))  # Result
reveal_type(engine.generate([1, 2, 3]))  # Result
reveal_type(engine.generate([{"role": "user", "content": "hi"}]))  # Result
reveal_type(engine.generate(chat, SamplingParams(n=2)))  # Result
reveal_type(engine.generate(["a", "b"], **fields))  # list[Result]
reveal_type(engine.generate(texts))  # list[Result]
reveal_type(engine.generate([[1], [3]], [SamplingParams(), radixkv.BeamParams()]))  # list[Result]
reveal_type(engine.generate(chats))  # list[Result]
reveal_type(engine.generate(mixed))  # list[Result]
reveal_type(engine.generate("a", on_error="return"))  # Result | Exception
reveal_type(engine.generate(texts, on_error="return"))  # list[Result | Exception]
reveal_type(engine.generate(torch.tensor([1, 2])))  # Any
reveal_type(engine.generate(np.array([1, 2])))  # Any
reveal_type(engine.generate("a").samples[0].finish_reason)  # Literal['stop', 'length', 'abort']
reveal_type(engine.submit("a", temperature=0))  # Request
reveal_type(engine.open(chat).generate(**fields))  # Result
reveal_type(engine.score("a", ["b", "c"]))  # list[Score]
reveal_type(engine.describe()["model"])  # Any


def shown(prompt: Prompt) -> Iterator[tuple[str, FinishReason | None]]:
    for delta in engine.stream(prompt, stop=["\\n"], seed=1):
        yield delta.text, delta.finish_reason


async def main() -> None:
    reveal_type(await engine.agenerate("a", seed=1))  # Result
    reveal_type(await engine.agenerate(texts))  # list[Result]
    async for delta in engine.astream("a", n=2):
        reveal_type(delta)  # Delta


asyncio.run(main())
"""

WRONG = """\
import radixkv
from radixkv import KVConfig, SamplingParams

engine = radixkv.Engine.from_pretrained("somewhere")
engine.generate("a", max_new_tokns=4)
engine.generate("a", temperature="hot")
engine.generate(["a"]).text
engine.generate("a").txt
engine.generate("a", on_error="ignore")
engine.generate("a", on_error="return").text
engine.generate("a")[0]
engine.generate(5)
engine.stream("a", max_tokens=4)
engine.submit("a", top_p="all")
engine.open("a").generate(tempature=1.0)
KVConfig(dtype="int9")
KVConfig(eviction="random")
SamplingParams(max_tokens=4)
radixkv.Engine.from_pretrained("somewhere", backend="cuda")
"""

# Of other packages mypy reads no types but NumPy's, and of torch's what tells a tensor from ours:
# reading all that is imported somewhere takes a minute.
TORCH = """
class Tensor: ...
class device: ...
class dtype: ...
def tensor(data: object) -> Tensor: ...
def __getattr__(name: str) -> object: ...
"""
MYPY = """
[mypy]
strict = true
follow_imports = skip
[mypy-numpy.*,radixkv.*]
follow_imports = normal
"""


def run(command: list[str], *, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A user's folder, and a Python that has radixkv by ``pip install -e``, as the README says."""
    folder = tmp_path_factory.mktemp("types")
    source, python = folder / "radixkv", folder / "venv" / "bin" / "python"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("radixkv", "kernels"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    venv.create(folder / "venv", with_pip=False)
    (own,) = (folder / "venv").glob("lib/python*/site-packages")
    outer = [path for path in sys.path if path.endswith("site-packages")]
    (own / "zz_outer.pth").write_text("\n".join(outer) + "\n")  # after our own on the path
    pip = ["pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    run([*pip, "--no-build-isolation", "-e", str(source)], cwd=folder)
    assert list(own.glob("*radixkv*.pth")), "the install has failed"
    user = folder / "user"
    user.mkdir()
    (user / "right.py").write_text(RIGHT)
    (user / "wrong.py").write_text(WRONG)
    return user, python


def expected_types() -> dict[int, str]:
    lines = enumerate(RIGHT.splitlines(), start=1)
    return {i: line.split("  # ")[1] for i, line in lines if "reveal_type(" in line}


def wrong_lines() -> list[int]:
    """All lines but the imports and the one that makes the engine."""
    lines = enumerate(WRONG.splitlines(), start=1)
    return [i for i, line in lines if line and not line.startswith(("import", "from", "engine ="))]


def test_mypy_knows_what_comes_back_and_flags_what_is_wrong(user):
    folder, python = user
    (folder / "stubs" / "torch").mkdir(parents=True)
    (folder / "stubs" / "torch" / "__init__.pyi").write_text(TORCH)
    (folder / "mypy.ini").write_text(MYPY)
    options = ["--python-executable", str(python), "--cache-dir", os.devnull]
    said = run(["mypy", *options, "right.py", "wrong.py"], cwd=folder, MYPYPATH="stubs")
    found = {}
    for line, kind in re.findall(
        r'^right\.py:(\d+): note: Revealed type is "(.*)"$', said, re.MULTILINE
    ):
        plain = re.sub(r"\b(?:radixkv\.[\w.]+|builtins)\.(\w+)", r"\1", kind)
        plain = plain.replace("'] | Literal['", "', '")
        found[int(line)] = plain
    assert found == expected_types()
    assert "right.py" not in "\n".join(line for line in said.splitlines() if "error:" in line)
    flagged = {int(line) for line in re.findall(r"^wrong\.py:(\d+): error:", said, re.MULTILINE)}
    assert sorted(flagged) == wrong_lines()


def test_pyright_knows_what_comes_back_and_flags_what_is_wrong(user):
    folder, python = user
    options = ["--pythonpath", str(python), "--outputjson"]
    said = json.loads(run(["pyright", *options, "right.py", "wrong.py"], cwd=folder))
    of_file = {"right.py": {}, "wrong.py": {}}
    errors = {"right.py": set(), "wrong.py": set()}
    for one in said["generalDiagnostics"]:
        name, line = Path(one["file"]).name, one["range"]["start"]["line"] + 1
        if one["severity"] == "error":
            errors[name].add(line)
        else:
            kind = re.fullmatch(r'Type of ".*" is "(.*)"', one["message"], re.DOTALL)
            of_file[name][line] = kind[1]
    assert of_file["right.py"] == expected_types()
    assert not errors["right.py"]
    assert sorted(errors["wrong.py"]) == wrong_lines()


def test_the_typed_fields_are_those_of_sampling_params():
    hints = typing.get_type_hints(SamplingParams)
    assert typing.get_type_hints(SamplingFields) == {
        f.name: hints[f.name] for f in fields(SamplingParams)
    }
    assert not SamplingFields.__required_keys__


def test_literals_are_the_choices_that_are_checked():
    hints = typing.get_type_hints(KVConfig)
    assert typing.get_args(hints["dtype"]) == KV_DTYPES
    assert typing.get_args(hints["rotate"]) == ROTATIONS
    assert typing.get_args(hints["eviction"]) == EVICTIONS
    assert typing.get_args(hints["shared_prefix"]) == SHARED_PREFIX
    assert BACKENDS[0] == "auto"


def test_each_sampling_field_has_a_role_a_range_if_it_is_a_number_and_a_fuzzer():
    from fuzz.inputs import ELSEWHERE, SOUND

    names = [f.name for f in fields(SamplingParams)]
    assert list(SAMPLING_ROLES) == names
    assert sorted([*SOUND, *ELSEWHERE]) == sorted(names)
    hints = typing.get_type_hints(SamplingParams)
    kinds = [int, float, int | None, float | None]
    numbers = {name for name, hint in hints.items() if hint in kinds}
    assert set(SAMPLING_NUMBERS) == numbers


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1, "n": 2}, False),
        ({"logit_bias": {}, "logits_processors": []}, False),
        ({"regex": "a"}, False),  # a guide says it
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"logits_processors": [lambda ids, logits: logits]}, True),
    ],
)
def test_what_changes_logits_is_told_by_the_roles(given, changes):
    assert SamplingParams(**given).changes_logits is changes
