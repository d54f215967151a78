"""Break one line of radix.py, pool.py or cache.py at a time, to see whether it is noticed.

    python -m fuzz.mutants --count 60 --seed 0

Each mutant changes one operator or constant, or leaves out one statement, chosen by seed; a
short run of the seeded worlds (and the doctests' modules) must fail. Survivors are printed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("radixkv/radix.py", "radixkv/pool.py", "radixkv/cache.py")
#: What the machine does not claim to check: text, display, counts for show, type-time code.
LEFT_OUT = {
    "free_device_bytes", "nbytes", "__repr__", "render", "to_html", "explain", "_head",
    "_note_evicted", "was_evicted", "evicted_digest", "attend", "attend_batch",
    "_attention_batch", "_broken", "check", "_refuse", "_is_integer", "__del__",
    "capacity_pages", "_require_open", "_require_layer",
}  # fmt: skip
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


class Site:
    """One place that can be broken, by its index in a walk over the tree."""

    def __init__(self, file: str, index: int, kind: str, line: int) -> None:
        self.file, self.index, self.kind, self.line = file, index, kind, line


def _marked(tree: ast.Module) -> list[ast.AST]:
    """The nodes that may be changed, outside docstrings, raises and what is left out."""
    found: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and node.name in LEFT_OUT:
            return
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.AnnAssign, ast.ImportFrom)):
            return
        found.append(node)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for top in tree.body:
        if isinstance(top, (ast.ClassDef, ast.FunctionDef)):
            visit(top)
    return found


def sites(file: str) -> list[Site]:
    """Every place of a file that can be broken."""
    out = []
    for index, node in enumerate(_marked(ast.parse((ROOT / file).read_text()))):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
            out.append(Site(file, index, "compare", line))
        elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in _SWAPS:
            out.append(Site(file, index, "operator", line))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            out.append(Site(file, index, "constant", line))
        elif isinstance(node, (ast.If, ast.While)):
            out.append(Site(file, index, "negate", line))
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Delete)) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            out.append(Site(file, index, "leave out", line))
    return out


def mutate(site: Site) -> tuple[str, str]:
    """The file's text with one place broken, and what was done."""
    tree = ast.parse((ROOT / site.file).read_text())
    node = _marked(tree)[site.index]
    before = ast.unparse(copy.deepcopy(node)).split("\n")[0]
    if isinstance(node, ast.Compare):
        node.ops[0] = _SWAPS[type(node.ops[0])]()  # type: ignore[assignment]
    elif site.kind == "operator":
        node.op = _SWAPS[type(node.op)]()  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant):
        node.value = node.value + 1  # type: ignore[operator]
    elif isinstance(node, (ast.If, ast.While)):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    if site.kind == "leave out":

        class Drop(ast.NodeTransformer):
            def visit(self, other: ast.AST) -> ast.AST:
                return (
                    ast.copy_location(ast.Pass(), other) if other is node else super().visit(other)
                )

        tree = Drop().visit(tree)
        after = "pass"
    else:
        after = ast.unparse(node).split("\n")[0]
    return ast.unparse(ast.fix_missing_locations(tree)), f"{before}  ->  {after}"


_CHECK = """
import torch; torch.set_num_threads(1)
from fuzz.driver import run_seed
for seed in range({seeds}):
    run_seed(seed, 60)
"""


def is_caught(site: Site, text: str, seeds: int) -> bool:
    """Whether a run over a copy of the project with that text fails (or never ends)."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("radixkv", "fuzz"):
            (Path(folder) / name).mkdir()
            for source in (ROOT / name).glob("*.py"):
                (Path(folder) / name / source.name).write_text(source.read_text())
        (Path(folder) / site.file).write_text(text)
        env = {**os.environ, "PYTHONPATH": folder, "RADIXKV_POISON": "1"}
        command = [sys.executable, "-W", "error", "-c", _CHECK.format(seeds=seeds)]
        try:
            done = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, timeout=240, check=False
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=int, default=60, help="seeded worlds a mutant must pass")
    args = parser.parse_args()
    every = [site for file in FILES for site in sites(file)]
    chosen = random.Random(args.seed).sample(every, args.count)
    caught = 0
    for done, site in enumerate(chosen, 1):
        text, what = mutate(site)
        if is_caught(site, text, args.worlds):
            caught += 1
        else:
            print(f"survived: {site.file}:{site.line} ({site.kind}) {what}", flush=True)
        if done % 10 == 0:
            print(f"{done} of {len(chosen)}: {caught} caught", flush=True)
    print(f"{caught} of {len(chosen)} caught ({caught / len(chosen):.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
