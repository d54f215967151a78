"""What a person sees of the cache: the tree as text and as a page, and why a match ended."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from radixkv import KVConfig, KVSpec, PrefixCache


def make_cache(num_pages: int = 64, page_size: int = 4) -> PrefixCache:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2)
    config = KVConfig(dtype="model", page_size=page_size, capacity=num_pages * page_size * 16)
    return PrefixCache(spec, config, backend="torch")


def put(cache: PrefixCache, token_ids: list[int], namespace: Any = None) -> None:
    with cache.acquire(token_ids, namespace=namespace) as lease:
        lease.commit(len(token_ids))


def test_explain_names_where_and_why() -> None:
    cache = make_cache()
    assert cache.explain([1, 2]).reason == "never_seen"
    assert cache.explain([0, 0]).reason == "never_seen"  # no digest of a page is an unused place's
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8, 30, 31])
    before = cache.render()

    hit = cache.explain([1, 2, 3, 4, 5])
    assert (hit.reason, hit.num_cached, hit.num_tokens) == ("hit", 5, 5)
    diverged = cache.explain([1, 2, 3, 99, 5])
    assert (diverged.reason, diverged.num_cached) == ("diverged", 3)
    assert (diverged.asked, diverged.cached) == (99, 4)
    assert "diverges at token 3: asked for 99, cached is 4" in str(diverged)
    fork = cache.explain([1, 2, 3, 4, 5, 6, 7, 8, 20])
    assert (fork.reason, fork.num_cached, fork.asked) == ("diverged", 8, 20)
    assert fork.cached in (9, 30)
    ended = cache.explain([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert (ended.reason, ended.num_cached) == ("ended", 9)
    assert cache.explain([50, 51]).reason == "never_seen"
    elsewhere = cache.explain([1, 2, 3], namespace="tenant")
    assert (elsewhere.reason, elsewhere.num_cached) == ("other_namespace", 0)
    assert "never share" in str(elsewhere)
    assert cache.render() == before  # looking changes nothing, not even ages

    cache.evict(1000)
    gone = cache.explain([1, 2, 3, 4, 5])
    assert (gone.reason, gone.num_cached) == ("evicted", 0)
    with pytest.raises(ValueError, match="0 to"):
        cache.explain([-1])


def test_evicted_is_said_of_what_was_evicted_alone() -> None:
    """Of pages of one token, too: neither an unused place nor another depth is taken for one."""
    cache = make_cache(page_size=1)
    assert {cache.explain([token]).reason for token in range(100)} == {"never_seen"}
    put(cache, [7, 8, 9])
    assert cache.evict(1) == 1
    told = [token for token in range(100) if cache.explain([7, 8, token]).reason == "evicted"]
    assert told == [9]
    told = [token for token in range(100) if cache.explain([token]).reason == "evicted"]
    assert told == []


def test_evicted_tails_are_explained_too() -> None:
    cache = make_cache()
    put(cache, list(range(20)))
    assert cache.evict(8) == 8
    cut = cache.explain(list(range(20)))
    assert (cut.reason, cut.num_cached) == ("evicted", 12)


def test_render_draws_every_node_with_its_facts(byte_tokenizer: Any) -> None:
    cache = make_cache()
    assert "0 nodes" in cache.render()
    put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    put(cache, [1, 2, 3, 4, 9, 9, 9])
    put(cache, [7, 7], namespace="tenant")
    with cache.pin([1, 2, 3, 4, 9, 9, 9]), cache.acquire([1, 2, 3, 4, 5, 6, 7, 8, 0]):
        text = cache.render()
    print(text)
    lines = text.splitlines()
    assert lines[0].startswith("model cache: 4 nodes, 13 tokens, 5 of 64 pages of 4 tokens")
    assert lines[1] == "(no namespace): 11 tokens, 3 pages"
    assert lines[2].startswith("└─ 4 tokens, 1 page, ")
    assert lines[2].endswith(": 1 2 3 4")
    assert lines[3].startswith("   ├─ 4 tokens, 1 page, ")
    assert "1 held" in lines[3]
    assert lines[4].startswith("   └─ 3 tokens, 1 page, ")
    assert "1 pinned" in lines[4]
    assert lines[5] == "namespace 'tenant': 2 tokens, 1 page"
    assert len(lines) == 7
    assert "... 2 below" in cache.render(max_depth=1)
    ids = byte_tokenizer("the onion", add_special_tokens=False)["input_ids"]
    put(cache, ids)
    assert ": the onion" in cache.render(tokenizer=byte_tokenizer)


def test_render_of_a_deep_and_a_wide_tree_does_not_recurse() -> None:
    cache = make_cache(num_pages=9000, page_size=1)
    for i in range(1, 1500):  # each diverges from the last one's end
        put(cache, [*range(i), 5000 + i])
    assert len(cache.render().splitlines()) >= 2900
    wide = make_cache(num_pages=400, page_size=1)
    for i in range(200):
        put(wide, [i])
    assert "160 more" in wide.render()


class Page(HTMLParser):
    """Checks that tags nest, and counts what a test asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.nodes = 0
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        attributes = dict(attrs)
        assert not {"src", "href", "onclick"} & attributes.keys(), "loads or runs something"
        assert tag != "script"
        self.nodes += "data-end" in attributes
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_one_whole_page(tmp_path: Path) -> None:
    cache = make_cache()
    rng = random.Random(0)
    for _ in range(20):
        put(cache, rng.choices(range(3), k=8), namespace=rng.choice([None, "<b>&'\""]))
    cache.to_html(tmp_path / "tree.html")
    page = Page()
    page.feed((tmp_path / "tree.html").read_text(encoding="utf-8"))
    assert not page.open
    assert page.nodes == cache.stats().nodes
    assert repr("<b>&'\"") in page.text
    assert re.search(r"pages_total\s*64", page.text)
