"""The bar: on a terminal, and nowhere else."""

from __future__ import annotations

import io
from typing import Any

import pytest

from radixkv import KVSpec, PrefixCache
from radixkv.progress import shown_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_done_and_how_much(monkeypatch: Any) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with shown_progress("counting") as show:
        show(1, 4)
        show(4, 4, "counted")
    assert "counted" in screen.getvalue()
    assert "4/4" in screen.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_that_is_not_wanted_or_has_no_terminal_writes_nothing(
    monkeypatch: Any, is_terminal: bool
) -> None:
    screen = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    with shown_progress("counting", shown=not is_terminal) as show:
        show(1, 4)
    assert screen.getvalue() == ""


def test_a_snapshot_that_is_saved_with_a_bar_writes_none_to_a_pipe(
    tmp_path: Any, capsys: Any
) -> None:
    cache = PrefixCache(KVSpec(num_layers=1, num_kv_heads=1, head_dim=4))
    cache.save(tmp_path / "a.rkv", progress=True)
    cache.load(tmp_path / "a.rkv", progress=True)
    assert capsys.readouterr() == ("", "")
