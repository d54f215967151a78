"""Break one line of the tree, the pool or the cache at a time, to see whether it is noticed.

    python -m fuzz.mutants --count 44 --seed 1

Each mutant changes one operator or constant, or leaves out one statement, chosen by seed. It is
caught if a short run of the seeded worlds fails or never ends, or else if the tests of these
files do. Each is printed with what caught it. The plain tree runs, but for mutants of the compiled
one, which is compiled anew for each.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

CPU_LIMIT_S = 120  # of worlds, and of tests: more is a loop without end
WALL_LIMIT_S = 1800  # of tests: threads that wait for each other use no processor time
ROOT = Path(__file__).resolve().parent.parent
COMPILED = ("radixkv/cache/compiled_tree.py", "kernels/tree.py")
FILES = (
    "radixkv/cache/tree.py", "radixkv/cache/pool.py", "radixkv/cache/prefix_cache.py",
    "radixkv/cache/lease.py",
    "radixkv/cache/plain_pool.py", "radixkv/cache/plain_tree.py", *COMPILED
)  # fmt: skip
TESTS = (
    "test_radix.py", "test_pool.py", "test_cache.py", "test_cache_leaks.py", "test_view.py",
    "test_plain_tree.py", "test_compiled_tree.py",
)  # fmt: skip
#: What they do not claim to check: texts, attention (which has tests of its own), what only
#: costs time, and `check`, which checks the rest.
LEFT_OUT = {
    "free_device_bytes", "__repr__", "_head", "attend", "attend_batch", "_attention_batch",
    "_broken", "check", "_check_queues", "_check_children", "_refuse_room", "_inline", "_jit",
    "_prefetch", "_fetch_ahead", "load_kernel", "nbytes", "require",
    "_require_readable", "_plan_of",
}  # fmt: skip
_OURS = ("radixkv", "radixkv_kernels", "fuzz")
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


def _copy(folder: Path, site: Site, text: str) -> None:
    """A copy of the project with one file's text replaced."""
    for name, copied in (
        ("radixkv", "radixkv"),
        ("fuzz", "fuzz"),
        ("tests", "tests"),
        ("kernels", "radixkv_kernels"),
    ):
        (folder / copied).mkdir()
        for source in (ROOT / name).glob("*.py"):
            shutil.copy(source, folder / copied)
    shutil.copytree(ROOT / "fuzz" / "corpus", folder / "fuzz" / "corpus")
    (folder / site.file.replace("kernels/", "radixkv_kernels/")).write_text(text)


def _limit_cpu() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))


def _worlds_fail(folder: Path, seeds: int, compiled: bool) -> bool:
    """Whether seeded worlds over the copy fail, or take more than CPU_LIMIT_S.

    In a fork, so that torch is imported once for all mutants.
    """
    child = os.fork()
    if not child:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        _limit_cpu()
        os.environ.update(RADIXKV_POISON="1", RADIXKV_PLAIN_TREE=str(int(not compiled)))
        warnings.simplefilter("error")
        for name in [n for n in sys.modules if n.split(".")[0] in _OURS]:
            del sys.modules[name]
        if not compiled:
            sys.modules["numba"] = None  # type: ignore[assignment]
        sys.path[:] = [str(folder), *(p for p in sys.path if p not in ("", str(ROOT)))]
        os.chdir(folder)
        try:
            from fuzz.driver import run_seed

            for seed in range(seeds):
                run_seed(seed, 60)
        except BaseException:  # any failure is what we look for
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def _tests_fail(folder: Path, compiled: bool) -> bool:
    """Whether the tests of the files that are broken fail on the copy, or never end."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-W", "error"]
    chosen = "not does_not_grow" if compiled else "not compiled and not False and not does_not_grow"
    command += ["--import-mode=importlib", "-k", chosen]
    command += [f"tests/{name}" for name in TESTS]
    env = {**os.environ, "PYTHONPATH": str(folder), "RADIXKV_PLAIN_TREE": str(int(not compiled))}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            capture_output=True,
            timeout=WALL_LIMIT_S,
            check=False,
            preexec_fn=_limit_cpu,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def caught_by(site: Site, text: str, seeds: int) -> str:
    """What fails over a copy of the project with that text: "worlds", "tests" or nothing, ""."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy(folder, site, text)
        compiled = site.file in COMPILED
        if _worlds_fail(folder, seeds, compiled):
            return "worlds"
        return "tests" if _tests_fail(folder, compiled) else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=int, default=40, help="seeded worlds a mutant must pass")
    parser.add_argument("--skip", type=int, default=0, help="the first of them, run before")
    parser.add_argument("--file", default="", help="break only files whose name has this in it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    every = [site for file in FILES if args.file in file for site in sites(file)]
    sound = Site(FILES[0], 0, "as it is", 0)
    if not args.skip and caught_by(sound, (ROOT / FILES[0]).read_text(), args.worlds):
        print("worlds or tests fail without any mutant; mend that first", file=sys.stderr)
        return 1
    chosen = random.Random(args.seed).sample(every, args.count)
    caught = 0
    for number, site in enumerate(chosen[args.skip :], args.skip + 1):
        text, what = mutate(site)
        by = caught_by(site, text, args.worlds)
        caught += bool(by)
        fate = f"caught by {by}" if by else "SURVIVED"
        print(f"{number}: {fate}: {site.file}:{site.line} ({site.kind}) {what}", flush=True)
    count = len(chosen) - args.skip
    print(f"{caught} of {count} caught ({caught / count:.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
