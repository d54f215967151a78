"""`radixkv bench load`: what `Engine.from_pretrained` takes in a process of its own, by parts.

Each run is a new process, as imports count. A part's time is its own: what another part took
inside it counts there. CPU time stands beside, since other work on the machine moves it less.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

from radixkv.config import require_int
from radixkv.errors import RadixKVError

PARTS = {
    "imports": "modules of transformers, Numba and what they need",
    "weights": "the model from its files",
    "tokenizer": "the tokenizer from its files",
    "served": "test that the model is served rightly",
    "invariant": "test whether the batch is felt",
    "K": "K of a fixed run, whose mean is taken off",
    "rest": "all else",
}


def bench_load(model: str | os.PathLike[str], *, repeats: int = 3) -> dict[str, Any]:
    """Load ``model`` in ``repeats`` processes, one after another.

    Args:
        model: folder or hub id.
    Returns:
        Medians in seconds: ``start_s`` (from the start of the process to ``radixkv`` imported),
        ``load_s`` (from the call of ``Engine.from_pretrained`` to its return), ``load_cpu_s``
        (the process's CPU time in it), ``parts_s`` (of ``load_s``, as `PARTS` names them).
    Raises:
        RadixKVError: the model could not be loaded.
    """
    require_int("repeats", repeats, 1)
    runs = []
    for _ in range(repeats):
        command = [sys.executable, "-m", "radixkv.bench.load", os.fspath(model), str(time.time())]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = (done.stderr.strip() or "nothing").splitlines()[-1]
            raise RadixKVError(
                f"--model: expected a model that Engine.from_pretrained loads, got {model!r}; "
                f"it said: {said}"
            )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    parts = {name: median(run["parts_s"][name] for run in runs) for name in PARTS}
    found = {
        name: median(run[name] for run in runs) for name in ("start_s", "load_s", "load_cpu_s")
    }
    return {"bench": "load", "repeats": repeats, **found, "parts_s": parts}


def _load(model: str, started: float) -> dict[str, Any]:
    """Load ``model`` here; the process was started at ``started``, of `time.time`."""
    from radixkv.engine.engine import Engine
    from radixkv.engine.loading import no_collections
    from radixkv.models.runner import ModelRunner

    start_s = time.time() - started
    taken: dict[str, float] = defaultdict(float)
    inside = [0.0]  # what was timed within the part that runs, and within those around it

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            inside.append(0.0)
            try:
                return call(*args, **keywords)
            finally:
                whole = time.perf_counter() - begin
                taken[name] += whole - inside.pop()
                inside[-1] += whole

        return run

    for home, name in ((builtins, "__import__"), (importlib, "import_module")):
        setattr(home, name, timed("imports", getattr(home, name)))
    for name, part in (("load", "served"), ("is_batch_invariant", "invariant")):
        setattr(ModelRunner, name, timed(part, getattr(ModelRunner, name)))
    sample = ModelRunner.__dict__["_k_sample"]
    sample.func = timed("K", sample.func)

    begin, cpu = time.perf_counter(), time.process_time()
    with no_collections():  # as the call itself imports them
        from transformers import AutoModelForCausalLM, AutoTokenizer

        for kind, part in ((AutoModelForCausalLM, "weights"), (AutoTokenizer, "tokenizer")):
            setattr(kind, "from_pretrained", timed(part, kind.from_pretrained))  # noqa: B010
        engine = Engine.from_pretrained(model)
    load_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    engine.close()
    parts = {name: taken[name] for name in PARTS} | {"rest": load_s - sum(taken.values())}
    return {"start_s": start_s, "load_s": load_s, "load_cpu_s": cpu_s, "parts_s": parts}


def report(found: dict[str, Any]) -> str:
    """A result of `bench_load`, a line for each part."""
    lines = [f"{name:10} {found['parts_s'][name]:6.2f} s  {text}" for name, text in PARTS.items()]
    lines.append(
        f"{'load':10} {found['load_s']:6.2f} s  Engine.from_pretrained from call to return"
    )
    lines.append(f"{'':10} {found['load_cpu_s']:6.2f} s  CPU time of that")
    lines.append(f"{'start':10} {found['start_s']:6.2f} s  before it: Python, torch and radixkv")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_load(sys.argv[1], float(sys.argv[2]))) + "\n")
