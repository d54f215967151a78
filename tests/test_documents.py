"""The documents name what is there: files, functions, environment variables, steps of recipes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import radixkv

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDER_PAGES = [
    page
    for folder in ("radixkv", "kernels", "fuzz", "tests")
    for page in sorted((ROOT / folder).rglob("README.md"))
]
# Pages that say what holds now. The log and the list of changes keep older names.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted(DOCS.glob("*.md")) if page.name != "CHANGELOG.md"),
    DOCS / "log" / "README.md",
    *FOLDER_PAGES,
]
ALL_PAGES = sorted({*PAGES, *DOCS.rglob("*.md")})
OLD_PATHS = {"langchain", "llama_index", "lm_eval", "metrics"}  # moved; the README names them
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def links(text: str) -> list[str]:
    found = re.findall(r"""(?:\]\(|href=")([^)"#]+)""", text)
    return [link for link in found if "://" not in link]


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_the_documents_lead_somewhere(page):
    missing = [link for link in links(text_of(page)) if not (page.parent / link).resolve().exists()]
    assert not missing


def test_the_map_of_documents_leads_to_every_page():
    mapped = {(DOCS / link).resolve() for link in links(text_of(DOCS / "index.md"))}
    log = {(DOCS / "log" / link).resolve() for link in links(text_of(DOCS / "log" / "README.md"))}
    assert {*DOCS.glob("*.md")} - {DOCS / "index.md"} <= mapped
    assert {*(DOCS / "log").glob("*.md")} - {DOCS / "log" / "README.md"} <= log


def is_there(name: str, page: Path) -> bool:
    bases = (page.parent, ROOT, ROOT / "radixkv", ROOT / "kernels", ROOT / "tests")
    return any(
        (base / name).exists() or (base / f"{name}.py").exists() or (base / f"{name}.md").exists()
        for base in bases
    )


def defined_in(text: str, name: str) -> bool:
    last = name.rpartition(".")[2]
    pattern = rf"^\s*(?:(?:async )?def|class) {last}\b|^\s*{last}\b\s*(?::[^=\n]+)?="
    return re.search(pattern, text, re.MULTILINE) is not None


def module_is_there(dotted: str) -> bool:
    """Whether a dotted name leads to a file of ours, and on to a name that it defines."""
    package, *rest = dotted.split(".")
    place = ROOT / {"radixkv": "radixkv", "radixkv_kernels": "kernels"}[package]
    if len(rest) == 1 and rest[0] in radixkv.__all__:
        return True
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    if rest and (place / f"{rest[0]}.py").is_file():
        place = place / f"{rest.pop(0)}.py"
    if not rest:
        return place.exists()
    file = place if place.is_file() else place / "__init__.py"
    return file.is_file() and rest[0] in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_files_and_modules_that_a_document_names_are_there(page):
    gone = []
    for name in in_code(text_of(page)):
        name = name.removesuffix("/") if name.endswith("/") else name
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+|[\w-]+\.(py|md|toml|txt)", name):
            if not is_there(name, page) and name != "page_id":
                gone.append(name)
        elif re.fullmatch(r"(radixkv|radixkv_kernels)(\.\w+)+", name) and not module_is_there(name):
            gone.append(name)
    assert not gone


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_functions_that_stand_behind_a_file_are_defined_in_it(page):
    """Where a link to a file is followed by names in code: `[file](path) `name`, `name``."""
    pattern = r"\]\(([^)]+\.py)\)(?: \(|:? )((?:(?:, | and )?`[A-Za-z_][\w.]*`)+)"
    for path, names in re.findall(pattern, text_of(page)):
        source = (page.parent / path).read_text(encoding="utf-8")
        for name in in_code(names):
            is_field = name.rpartition(".")[2] in source and "." in name
            assert defined_in(source, name) or is_field, f"{path}: {name}"


# Those of fuzz/ and tests/ go by what is shown, not by file.
@pytest.mark.parametrize(
    "page",
    [page for page in FOLDER_PAGES if page.parent.name not in ("fuzz", "tests")],
    ids=lambda page: str(page.parent.relative_to(ROOT)),
)
def test_a_folders_page_names_each_of_its_files(page):
    named = {
        name.removesuffix(".py").removesuffix("/") for name in in_code(page.read_text("utf-8"))
    }
    own = {path.stem for path in page.parent.glob("*.py")} - {"__init__", "__main__"}
    own |= {path.parent.name for path in page.parent.glob("*/__init__.py")}
    assert own <= named
    folder_tables = page.parent != ROOT / "kernels"
    if folder_tables and "| file |" in page.read_text("utf-8"):
        first = re.findall(r"^\| (`[^|]+) \|", page.read_text("utf-8"), re.MULTILINE)
        listed = {name for cell in first for name in in_code(cell)}
        assert listed <= own


def test_documents_that_the_code_names_are_there():
    for path in python_files("radixkv", "kernels", "tests", "fuzz", "examples"):
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{path}: {name}"


def test_old_paths_of_the_integrations_still_stand():
    assert {path.stem for path in (ROOT / "radixkv").glob("*.py")} >= OLD_PATHS


# Environment variables

VARIABLE = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+"


def own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """What a statement itself holds, without the statements of its body."""
    for _, value in ast.iter_fields(statement):
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(node, ast.stmt):
                yield from ast.walk(node)


def constants(module: ast.Module) -> dict[str, list[str]]:
    """Texts in each constant of a module."""
    return {
        target.id: [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def variables_of_the_library() -> Iterator[str]:
    """Texts that look like a variable, in statements that ask for the environment.

    And what comes by way of other libraries, of which the files only speak.
    """
    for path in python_files("radixkv", "kernels"):
        source = path.read_text(encoding="utf-8")
        yield from re.findall(r"\b(?:NUMBA|OMP|RADIXKV|TORCH|TRITON)_[A-Z][A-Z_]*\b", source)
        module = ast.parse(source)
        known = constants(module)
        for statement in ast.walk(module):
            if not isinstance(statement, ast.stmt):
                continue
            nodes = list(own_expressions(statement))
            if not any(getattr(n, "attr", "") in ("environ", "getenv") for n in nodes):
                continue
            texts = [n.value for n in nodes if isinstance(n, ast.Constant)]
            for node in nodes:
                texts += known.get(node.id, []) if isinstance(node, ast.Name) else []
            yield from (text for text in texts if re.fullmatch(VARIABLE, str(text)))


def variables_of_tests() -> Iterator[str]:
    reads = rf"""(?:environ\.(?:get|setdefault|pop)\(|getenv\(|environ\[)["']({VARIABLE})["']"""
    for path in python_files("tests", "fuzz", "examples"):
        yield from re.findall(reads, path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".ci").iterdir()):
        yield from re.findall(rf"\$\{{({VARIABLE})", path.read_text(encoding="utf-8"))


def test_the_page_of_environment_variables_names_exactly_those_that_are_read():
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    named = [name for row in rows for name in in_code(row)]
    assert len(named) == len(set(named))
    assert set(named) == {*variables_of_the_library(), *variables_of_tests()}


# Recipes: an example that is there already must be known to no file that the recipe leaves out.


def recipe(title: str) -> str:
    page = (DOCS / "how-to-add.md").read_text(encoding="utf-8")
    (steps,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return steps


def files_that_know(pattern: str, *folders: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in python_files(*folders)
        if re.search(pattern, path.read_text(encoding="utf-8"), re.IGNORECASE)
    }


def steps_of(title: str) -> set[str]:
    return {str((DOCS / link).resolve().relative_to(ROOT)) for link in links(recipe(title))}


def test_the_recipe_for_a_format_leaves_out_no_file_that_knows_one():
    assert files_that_know(r"\bfp8_e5m2\b", "radixkv", "kernels") <= steps_of("A KV format")


def test_the_recipe_for_a_sampling_field_leaves_out_no_file_that_knows_one():
    known = files_that_know(r"\bmin_p\b", "radixkv", "fuzz")
    known -= {"radixkv/bench/workloads.py"}  # an argument of llama-cpp-python
    assert known <= steps_of("A sampling field")
    assert "is_processed" in recipe("A sampling field")


def test_the_recipe_for_a_family_names_the_file_that_knows_families():
    assert files_that_know(r"modeling_qwen3", "radixkv") <= steps_of("A model family")


def test_the_recipe_for_a_backend_names_the_files_that_list_them():
    steps = steps_of("A backend")
    for path in python_files("radixkv"):
        source = path.read_text(encoding="utf-8")
        if re.search(r"^BACKENDS\b|^def get_backend\b|^class Backend\b", source, re.MULTILINE):
            assert str(path.relative_to(ROOT)) in steps


def test_the_newest_changes_are_those_of_this_version():
    page = (DOCS / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[([^\]]+)\]", page, re.MULTILINE)
    assert versions[:2] == ["Unreleased", radixkv.__version__]
