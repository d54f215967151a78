"""Whatever is still held when the interpreter ends, it ends without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What a program leaves behind: each way has its objects die at another moment of the shutdown.
WAYS = {
    "in a global": "",
    "in a cycle": "class Knot: pass\nknot = Knot(); knot.me = knot; knot.held = held; del knot\n",
    "in builtins": "import builtins; builtins.kept = held\n",
    "in sys.modules": "import sys, types; m = types.ModuleType('m'); m.held = held\n"
    "sys.modules['zz'] = m\n",
    "in an atexit function": "import atexit; atexit.register(lambda held=held: None)\n",
    "in a thread that never ends": "import threading\n"
    "threading.Thread(target=lambda held: threading.Event().wait(), args=(held,), daemon=True)"
    ".start()\n",
}

CACHE = """
import torch, radixkv  # its modules live as long as this one, and are emptied before it
from radixkv import *
from radixkv.cache.snapshot import Snapshot
def make():
    cache = PrefixCache(KVSpec(num_layers=1, num_kv_heads=1, head_dim=8),
                        KVConfig(page_size=4, capacity="64KiB"), backend="torch")
    lease = cache.acquire(range(1, 9))
    lease.write(0, torch.zeros(8, 1, 8), torch.zeros(8, 1, 8))
    lease.commit()
    cache.save(path)
    return [lease, lease.fork(), cache.acquire([5]), cache.pin(range(1, 9)),
            cache.pin([1, 2], ttl=60.0), Snapshot(path), cache]
"""

ENGINE = """
import radixkv
import transformers as tf
from radixkv import Engine, KVConfig
config = tf.LlamaConfig(vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
def make():
    engine = Engine(tf.AutoModelForCausalLM.from_config(config).eval(), backend="torch",
                    kv=KVConfig(page_size=4, capacity="256KiB"))
    stream = engine.stream([5, 6, 7], max_new_tokens=40, ignore_eos=True)
    next(stream)
    branch = engine.open([5, 6, 7, 8])
    branch.generate(max_new_tokens=2)
    return [stream, engine.stream([5, 6, 8], max_new_tokens=9), branch, branch.fork(1),
            engine.submit([9, 9], max_new_tokens=3), engine.generate([1, 2], max_new_tokens=2),
            engine.cache.pin([5, 6, 7]), engine.cache, engine, engine.model]
"""


def run(code: str, folder: Path) -> tuple[int, str]:
    """The exit code, and what was written to standard error.

    To a file: into a pipe Python writes nothing once its own streams are gone.
    """
    with (folder / "told").open("w+") as told:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=told,
            stderr=told,
            check=False,
        )
        told.seek(0)
        return done.returncode, told.read()


def test_leases_pins_and_snapshots_may_be_held_at_the_end(tmp_path):
    code = f"path = {str(tmp_path / 'a.rkv')!r}\n{CACHE}"
    for number, way in enumerate(WAYS):
        code += f"held{number} = held = make()\n{WAYS[way]}del held\n"
    code += "raise SystemExit(3)\n"
    assert run(code, tmp_path) == (3, "")


def test_engines_streams_and_branches_may_be_held_at_the_end(tmp_path):
    code = f"{ENGINE}held = make()\n{WAYS['in builtins']}held = make()\n"
    assert run(code, tmp_path) == (0, "")


def test_a_lease_that_is_dropped_before_the_end_is_told_of_once_and_one_at_the_end_is_not(tmp_path):
    code = f"import os, warnings; warnings.simplefilter('always')\n{CACHE}"
    code = code.replace("cache.save(path)", "").replace("Snapshot(path), ", "")
    _, told = run(f"{code}held = make()\ndel held[0]\n", tmp_path)
    assert told.count("ResourceWarning: a lease of 8 tokens was dropped without release()") == 1
