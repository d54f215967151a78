"""Every example runs on the real model, and says what was reused."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import Engine
from radixkv.models.small_model import prepare_small_model

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(prepare_small_model(progress=False)) as engine:
        yield engine


@pytest.fixture
def run(engine: Engine, capsys: Any) -> Iterator[Callable[[str], str]]:
    """``run(name)``: what the example prints, from an empty cache; no page stays held."""

    def run(name: str) -> str:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        engine.cache.clear()
        capsys.readouterr()
        example.main(engine)
        return str(capsys.readouterr().out)

    yield run
    engine.cache.check()
    stats = engine.cache.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def numbers(pattern: str, text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, found.groups())) for found in re.finditer(pattern, text)]


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 80, path.name


def test_rag_reads_each_text_once(run: Callable[[str], str]) -> None:
    out = run("rag_folder")
    assert re.findall(r"\[(\w+)\.txt\]", out) == ["mill", "ferry", "mill"]
    assert "1782" in out and "red flag" in out and "Anna Voss" in out
    (first, _), _, (again, prompt) = numbers(r"(\d+) of (\d+) tokens reused", out)
    assert first == 0
    assert again > 0.7 * prompt


def test_an_agent_runs_only_what_is_new(run: Callable[[str], str]) -> None:
    out = run("agent_branches")
    assert 'count("flour") -> 12' in out
    turns = numbers(r"\((\d+) of (\d+) prompt tokens run\)", out)
    assert len(turns) > 1
    assert turns[0][0] < 0.6 * turns[0][1]  # two looked ahead, one prompt was run
    assert all(ran < 0.25 * prompt for ran, prompt in turns[1:])


def test_best_of_n_runs_its_prompt_once(run: Callable[[str], str]) -> None:
    out = run("best_of_n")
    ((ran, apart),) = numbers(r"ran (\d+) prompt tokens, not (\d+)", out)
    assert apart == 4 * ran
    assert len(set(re.findall(r"^\d\. (.+)$", out, re.MULTILINE))) == 4
    ((hits, asked),) = numbers(r"judging: (\d+) of (\d+)", out)
    assert hits > 0.3 * asked


def test_beams_find_likelier_text_on_shared_pages(run: Callable[[str], str]) -> None:
    out = run("beams_and_greedy")
    greedy, *beams = [float(found) for found in re.findall(r"(-\d+\.\d+) ", out)]
    assert len(beams) == 4
    assert beams == sorted(beams, reverse=True)
    assert beams[0] >= greedy
    ((held, apart),) = numbers(
        r"beams held (\d+) pages at the most; apart they would be (\d+)", out
    )
    assert held < apart
    ((cached, prompt),) = numbers(r"(\d+) of (\d+) prompt tokens reused", out)
    assert cached == prompt - 1


def test_tree_search_runs_its_prompt_once(run: Callable[[str], str]) -> None:
    out = run("tree_search")
    ((made, left, whole, slots),) = numbers(
        r"(\d+) branches; (\d+) open ones of (\d+) tokens in (\d+) token slots", out
    )
    assert (made, left) == (15, 11)
    ((ran,),) = numbers(r"the model ran (\d+) prompt tokens", out)
    assert ran < whole / 3
    assert slots < whole * 2
