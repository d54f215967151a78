"""What is known of a model from an earlier load is what would be measured, of that model alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import Engine, KVConfig
from radixkv.models import measurements as measures
from radixkv.models.runner import ModelRunner

PROMPT = list(range(3, 40))
BOTH = ["_measure_invariance", "_mean_of_k"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is measured from here on, in a cache folder of the test's own."""
    monkeypatch.setenv("RADIXKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(measures, "_WORTH_BYTES", 0)
    names: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        own = getattr(ModelRunner, name)

        def run(*args: Any) -> Any:
            names.append(name)
            return own(*args)

        return run

    for name in BOTH:
        monkeypatch.setattr(ModelRunner, name, noted(name))
    return names


def load(model: Any, **kv: Any) -> tuple[Any, ...]:
    """All that a measurement decides."""
    kv.setdefault("dtype", "int8")
    with Engine(model, kv=KVConfig(capacity="1MiB", **kv)) as engine:
        made = engine.generate(PROMPT, max_new_tokens=8, temperature=0, ignore_eos=True)
        center = engine.core.runner.k_center.numpy().tobytes()
        return engine.is_batch_invariant, center, made.samples[0].token_ids


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / measures.FOLDER_NAME).glob("*"))


def test_what_was_measured_once_is_known_the_next_time(
    measured: list[str], tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    first = load(tiny_model("llama", fresh=True))
    assert sorted(measured) == sorted(BOTH)
    assert load(tiny_model("llama", fresh=True)) == first  # the same weights in another object
    assert sorted(measured) == sorted(BOTH)
    assert len(files(tmp_path)) == 1
    load(tiny_model("llama", fresh=True), page_size=8)  # only what is invariant depends on it
    assert sorted(measured) == sorted([*BOTH, "_measure_invariance"])
    assert len(files(tmp_path)) == 1


def test_another_model_is_measured_anew(
    measured: list[str], tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    load(tiny_model("llama", fresh=True))
    model = tiny_model("llama", fresh=True)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[1, 1] += 1e-3
    load(model)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        load(tiny_model("llama", fresh=True))
    finally:
        torch.set_num_threads(threads)
    assert sorted(measured) == sorted(3 * BOTH)
    assert len(files(tmp_path)) == 3


def test_nothing_is_kept_of_a_model_that_runs_code_of_others(
    measured: list[str],
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooked = tiny_model("llama", fresh=True)
    hooked.model.layers[1].register_forward_hook(lambda module, args, out: None)
    load(hooked)
    replaced = tiny_model("llama", fresh=True)
    own = replaced.model.layers[0].mlp.forward
    replaced.model.layers[0].mlp.forward = lambda x: own(x)
    load(replaced)
    patched = tiny_model("llama", fresh=True)
    kind = type(patched.model.layers[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x))
    load(patched)
    monkeypatch.undo()
    assert sorted(measured) == sorted(3 * BOTH)
    assert not files(tmp_path)


def test_nothing_is_kept_of_a_small_model(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    assert measures.Measures.of(tiny_model("llama", fresh=True))._path is None


def test_weights_that_change_are_measured_and_forgotten(
    measured: list[str], tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model("llama", fresh=True)
    load(model)
    content = files(tmp_path)[0].read_bytes()
    with Engine(model, kv=KVConfig(dtype="int8", capacity="1MiB")) as engine:
        before = engine.core.runner.k_center.clone()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.mul_(-1.5)
        engine.generate(PROMPT, max_new_tokens=2, temperature=0, ignore_eos=True)
        assert not torch.allclose(engine.core.runner.k_center, before)
    assert [file.read_bytes() for file in files(tmp_path)] == [content]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-3], lambda b: b"", lambda b: b[:40] + b"\0" + b[41:]]
)
def test_a_damaged_file_counts_as_none(
    measured: list[str],
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
) -> None:
    first = load(tiny_model("llama", fresh=True))
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert load(tiny_model("llama", fresh=True)) == first
    assert "is damaged" in caplog.text
    assert sorted(measured) == sorted(2 * BOTH)
    assert file.read_bytes() == whole


def test_without_a_place_to_keep_it_everything_works(
    measured: list[str],
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RADIXKV_CACHE_DIR", str(tmp_path / "file"))
    first = load(tiny_model("llama", fresh=True))
    assert "cannot be" in caplog.text
    assert load(tiny_model("llama", fresh=True)) == first
    assert sorted(measured) == sorted(2 * BOTH)


def test_the_oldest_files_go(tmp_path: Path) -> None:
    for i in range(measures.MAX_FILES + 3):
        measures.Measures(tmp_path / f"{i:04d}.msgpack").put("name", b"value")
    assert len(list(tmp_path.glob("*"))) == measures.MAX_FILES
    assert measures.Measures(tmp_path / f"{i:04d}.msgpack").get("name") == b"value"


def test_what_is_kept_is_named_by_every_source_of_library_and_kernels(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    before = measures._name(model)
    asked: list[Path] = []

    def digest_of(*folders: Path) -> str:
        asked.extend(folders)
        return "of other sources"

    assert measures._name(model) == before
    monkeypatch.setattr(measures.sources, "digest_of", digest_of)
    assert measures._name(model) != before
    root = Path(__file__).resolve().parent.parent
    assert asked == [root / "radixkv", root / "kernels"]
