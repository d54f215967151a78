"""Nothing that only some systems have is needed: as on Windows and macOS, simulated."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv import disk as whole_file

ROOT = Path(__file__).resolve().parent.parent
UNIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix"}
# What Python's documentation calls "Unix" or "not on Windows" of what a library like this may use.
UNIX_NAMES = {
    "O_CLOEXEC", "O_DIRECTORY", "O_DSYNC", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "chown",
    "confstr", "fchdir", "fchmod", "fork", "forkpty", "getegid", "geteuid", "getgid",
    "getloadavg", "getpgid", "getpriority", "getuid", "initgroups", "killpg", "lchown",
    "mkfifo", "mknod", "nice", "openpty", "pathconf", "pipe2", "posix_fadvise",
    "posix_fallocate", "posix_spawn", "pread", "preadv", "pwrite", "pwritev", "register_at_fork",
    "sched_getaffinity", "sched_setaffinity", "sched_yield", "sendfile", "setpriority",
    "statvfs", "sync", "sysconf", "uname", "wait", "wait3", "wait4", "waitpid",
}  # fmt: skip

# Other packages are imported first: what they need of this system is not what is asked here.
OTHERS = "import torch, transformers, tokenizers, msgpack, xxhash, rich.console, rich.progress, "
OTHERS += "numba, llvmlite, click, platformdirs, psutil, jinja2, asyncio, subprocess, "
OTHERS += "multiprocessing, logging, http"

LESS = f"""
import builtins, io, os, pathlib, sys
{OTHERS}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(UNIX_MODULES)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
for name in {sorted(UNIX_MODULES)!r}:
    sys.modules.pop(name, None)
for name in {sorted(UNIX_NAMES)!r}:
    if hasattr(os, name):
        delattr(os, name)
own_open = pathlib.Path.open
def path_open(self, *args, **named):
    if str(self).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", str(self))
    return own_open(self, *args, **named)
pathlib.Path.open = path_open
"""

WORK = """
import importlib, pathlib, torch, radixkv
OPTIONAL = {"langchain", "llama_index", "lm_eval", "metrics", "gpu_compile", "triton", "gpu",
            "__main__"}
root = pathlib.Path(radixkv.__file__).parent
for path in sorted(root.rglob("*.py")):
    if path.stem not in OPTIONAL and path.parent.name != "integrations":
        importlib.import_module(".".join(path.with_suffix("").relative_to(root.parent).parts))
from radixkv import KVConfig, KVSpec, PrefixCache
spec = KVSpec(num_layers=2, num_kv_heads=2, head_dim=16)
assert PrefixCache(spec).stats().capacity_bytes > 0  # a share of the free memory
for backend in ("torch", "cpu"):
    cache, other = (PrefixCache(spec, KVConfig(page_size=4, capacity="256KiB"), backend=backend)
                    for _ in range(2))
    with cache.acquire(range(1, 12)) as lease:
        for layer in range(2):
            lease.write(layer, *torch.randn(2, 11, 2, 16))
            assert torch.isfinite(lease.attend(layer, torch.randn(11, 4, 16))).all()
        lease.commit()
    for _ in range(2):  # once more over the file that is there
        cache.save(folder / "a.rkv")
    assert other.load(folder / "a.rkv").tokens == 11
    assert other.match(range(1, 12)) == 11
    other.check()
assert [path.name for path in folder.iterdir()] == ["a.rkv"]
from radixkv.cli import main as cli
assert cli.main(["snapshot", "verify", str(folder / "a.rkv"), "--json"]) == 0
try:
    PrefixCache(spec, KVConfig(capacity="1000TB"))
except radixkv.CapacityError as error:
    assert "bytes are free now" in str(error)
else:
    raise AssertionError("more than there is")
"""

ENGINE = """
import transformers as tf
from radixkv import Engine
from radixkv.engine.loading import cpu_has_bfloat16
cpu_has_bfloat16()
config = tf.LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
with Engine(tf.AutoModelForCausalLM.from_config(config).eval(),
            kv=KVConfig(page_size=4, capacity="256KiB")) as engine:
    first = engine.generate([5, 6, 7, 8, 9], max_new_tokens=3, temperature=0, ignore_eos=True)
    engine.cache.save(folder / "b.rkv")
    engine.cache.clear()
    engine.cache.load(folder / "b.rkv")
    again = engine.generate([5, 6, 7, 8, 9], max_new_tokens=3, temperature=0, ignore_eos=True)
    assert (again.samples[0].token_ids, again.cached_tokens) == (first.samples[0].token_ids, 4)
"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_everything_runs_without_what_only_unix_has(tmp_path):
    run(f"{LESS}\nfolder = pathlib.Path({str(tmp_path)!r})\n{WORK}\n{ENGINE}")


def test_modules_can_be_imported_and_caches_used_where_the_platform_is_another(tmp_path):
    folder = f"folder = pathlib.Path({str(tmp_path)!r})"
    run(f"{LESS}\nsys.platform = 'win32'\n{folder}\n{WORK}")


def test_without_locks_a_file_is_replaced_whole_and_old_leftovers_alone_are_removed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(whole_file, "fcntl", None)
    target = tmp_path / "a.rkv"
    with whole_file.replacing(target) as file:
        file.write(b"first\r\n\n")
        assert not target.exists()
    assert target.read_bytes() == b"first\r\n\n"
    fresh, old = tmp_path / ".a.rkv.01.saving", tmp_path / ".a.rkv.02.saving"
    for path in (fresh, old):
        path.write_bytes(b"half")
    os.utime(old, (1e9, 1e9))
    with pytest.raises(TypeError), whole_file.replacing(target) as file:
        file.write("no bytes")
    assert target.read_bytes() == b"first\r\n\n"
    assert set(tmp_path.iterdir()) == {target, fresh}
    with whole_file.replacing(target) as file:
        file.write(b"second")
    assert target.read_bytes() == b"second"
    assert set(tmp_path.iterdir()) == {target, fresh}


def guarded(tree: ast.Module) -> set[ast.AST]:
    """Nodes inside an ``if`` or ``try`` that asks whether the system has it."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        asks = isinstance(node, ast.Try) and any(
            isinstance(h.type, ast.Name) and h.type.id in ("ImportError", "ModuleNotFoundError")
            for h in node.handlers
        )
        if isinstance(node, (ast.If, ast.IfExp)):
            test = ast.dump(node.test)
            asks = "hasattr" in test or "platform" in test
        if asks:
            found.update(ast.walk(node))
    return found


@pytest.mark.parametrize("folder", ["radixkv", "kernels"])
def test_what_only_unix_has_is_asked_for_before_it_is_used(folder):
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        safe = guarded(tree)
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name in UNIX_MODULES]
            elif isinstance(node, ast.ImportFrom) and node.module in {*UNIX_MODULES, "os"}:
                found = {alias.name for alias in node.names}
                names = sorted(found & UNIX_NAMES) if node.module == "os" else [node.module]
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
                and node.attr in UNIX_NAMES
            ):
                names = [node.attr]
            if names and node not in safe:
                wrong.append(f"{path.name}:{node.lineno}: {', '.join(names)}")
    assert wrong == []


def test_every_opened_text_names_its_encoding():
    """Windows has another default."""
    wrong = []
    for folder in ("radixkv", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "huge_pages.py":
                continue  # reads numbers that Linux alone has
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                given = {keyword.arg for keyword in node.keywords}
                if node.func.attr in ("read_text", "write_text") and "encoding" not in given:
                    wrong.append(f"{path.name}:{node.lineno}")
    assert wrong == []
