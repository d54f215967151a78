"""Break single lines that a change added, to see whether a test notices.

    python -m pytest --cov=radixkv --cov-context=test --cov-report=
    python -m fuzz.mutate_change --since v0.1.0 --count 60 --seed 1

The first command (with pytest-cov) notes in ``.coverage`` which tests run which line. Of the lines
of ``radixkv/`` that came after the commit, places are drawn by seed; each is broken as in
`fuzz.mutants`, in a copy of the project, and the tests that run it are run there, those of the
fewest lines first. Compiled kernels leave no trace in ``.coverage`` and are left out.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from fuzz.mutants import ROOT, Site, mutate, sites

#: What measures or draws and is not part of what a caller gets.
_LEFT_OUT = re.compile(r"radixkv/(bench|cli|tools/demo|attention/(triton|tiles))")


def changed_lines(since: str) -> dict[str, set[int]]:
    """Lines of the package that came after a commit, by file; what was only moved did not."""
    listed = ["git", "ls-files", "radixkv/*.py"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[int]] = {}
    for file in files.splitlines():
        # -C twice: moved from any file of the commit that made this one.
        command = ["git", "blame", "-s", "-w", "-M", "-C", "-C", f"{since}..HEAD", "--", file]
        blame = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        lines = enumerate(blame.stdout.splitlines(), 1)
        found[file] = {number for number, line in lines if not line.startswith("^")}
    return found


def tests_of(data_file: Path) -> tuple[dict[tuple[str, int], set[str]], Counter[str]]:
    """Which tests ran each line, and how many lines each test ran."""
    from coverage import CoverageData

    data = CoverageData(str(data_file))
    data.read()
    by_line: dict[tuple[str, int], set[str]] = {}
    sizes: Counter[str] = Counter()
    for file in data.measured_files():
        name = Path(file).relative_to(ROOT).as_posix()
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = {context.rpartition("|")[0] for context in contexts if context}
            sizes.update(tests)
            by_line[name, line] = tests
    return by_line, sizes


def _copy(folder: Path, site: Site, text: str) -> None:
    """A copy of what git knows, with one file's text replaced; kernels are compiled already."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    archive = f"{' '.join(listed)} | tar --null --files-from=- --create | tar -x -C '{folder}'"
    subprocess.run(["bash", "-c", archive], cwd=ROOT, check=True)
    (folder / "radixkv_kernels").symlink_to(ROOT / "kernels")
    (folder / site.file).write_text(text)


def is_caught(site: Site, text: str, tests: list[str], limit_s: int) -> bool:
    """Whether any of the tests fails on the copy, or they take more than ``limit_s``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy(folder, site, text)
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "no:cov"]
        try:
            done = subprocess.run(
                [*command, *tests],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True
        if done.returncode in (0, 1):
            return done.returncode == 1
        said = done.stdout.decode()[-1500:] + done.stderr.decode()[-1500:]
        if re.search("error during collection|ImportError while loading conftest", said):
            return True  # it breaks what is imported
        raise RuntimeError(f"{site.file}:{site.line}: pytest ended with {done.returncode}: {said}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.mutate_change", description=__doc__)
    parser.add_argument("--since", required=True, help="the commit before the change")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="the first of them, run before")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the mutants that are run")
    parser.add_argument("--most-tests", type=int, default=60, help="tests of one mutant")
    parser.add_argument("--limit", type=int, default=600, help="seconds for the tests of one")
    args = parser.parse_args()
    by_line, sizes = tests_of(ROOT / ".coverage")
    every = [
        site
        for file, lines in changed_lines(args.since).items()
        if file.endswith(".py") and not _LEFT_OUT.match(file) and (ROOT / file).exists()
        for site in sites(file)
        if site.line in lines
    ]
    chosen = random.Random(args.seed).sample(every, min(args.count, len(every)))
    caught = count = 0
    for number, site in enumerate(chosen, 1):
        if number <= args.skip or (args.only and number not in args.only):
            continue
        count += 1
        text, what = mutate(site)
        tests = sorted(by_line.get((site.file, site.line), ()), key=lambda t: sizes[t])
        is_seen = bool(tests) and is_caught(site, text, tests[: args.most_tests], args.limit)
        caught += is_seen
        fate = "caught" if is_seen else "SURVIVED" if tests else "NO TEST RUNS IT"
        print(f"{number}: {fate}: {site.file}:{site.line} ({site.kind}) {what}", flush=True)
    print(f"{caught} of {count} caught ({caught / max(count, 1):.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
