"""Looking into the tree: as text, as a page for a browser, and why a match ended where it did."""

from __future__ import annotations

import html
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from radixkv.cache.tree import Match, Node, RadixTree, Root, Tokens, namespace_key

_SHOWN_CHARS = 60  # of a node's text, and
_SHOWN_IDS = 12  # of its token ids where there is no tokenizer
_SHOWN_CHILDREN = 40  # of one node; the rest is counted

Reason = Literal["hit", "ended", "diverged", "evicted", "other_namespace", "never_seen"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Where and why a match ends.

    Attributes:
        num_tokens: tokens asked for.
        num_cached: tokens matched: the match ends before the token at this index.
        reason: ``"hit"``: all is cached. ``"ended"``: the cached sequence is a prefix of what
            was asked. ``"diverged"``: what is cached goes on with another token.
            ``"evicted"``: it was cached, and its page was evicted. ``"other_namespace"``:
            more of it is cached elsewhere. ``"never_seen"``: nothing cached begins so.
        asked, cached: the token at the end of the match, and what is cached in its place.
        namespace: where more of it is cached.
        text: all this in a sentence.
    """

    num_tokens: int
    num_cached: int
    reason: Reason
    asked: int | None = None
    cached: int | None = None
    namespace: Hashable = None
    text: str = ""

    def __str__(self) -> str:
        return self.text


def explain(tree: RadixTree, tokens: Tokens, namespace: Hashable) -> Explanation:
    """Say why the match of ``tokens`` ends where it does; changes nothing.

    That a page was evicted is told from a digest of its tokens among the last evicted runs,
    so it is a very likely reason, never the proof of a hit.

    Complexity: a match in each namespace.
    """
    found = tree.match(tokens, namespace)
    num_tokens, num_cached = tokens.size, found.num_tokens
    where = f"{num_cached} of {num_tokens} tokens are cached"
    if num_cached == num_tokens:
        return Explanation(
            num_tokens=num_tokens, num_cached=num_cached, reason="hit", text=f"{where}: all"
        )
    asked = tokens.item(num_cached)

    def because(reason: Reason, text: str, **more: Any) -> Explanation:
        return Explanation(
            num_tokens=num_tokens,
            num_cached=num_cached,
            reason=reason,
            asked=asked,
            text=f"{where}; {text}",
            **more,
        )

    depth = num_cached // tree.page_size
    if tree.was_evicted(tokens, depth):
        return because(
            "evicted",
            f"what followed token {depth * tree.page_size} was cached and has been evicted; raise "
            f"the capacity, or pin it",
        )
    best, most = None, num_cached
    for key, root in tree.roots.items():
        if key != namespace_key(namespace):
            matched = tree.match(tokens, root.namespace).num_tokens
            if matched > most:
                best, most = root.namespace, matched
    if most > num_cached:
        return because(
            "other_namespace",
            f"namespace {best!r} holds {most} of them, but namespaces never share",
            namespace=best,
        )
    cached = _next_token(tree, found, namespace)
    if cached is not None and num_cached:
        return because(
            "diverged",
            f"it diverges at token {num_cached}: asked for {asked}, cached is {cached}",
            cached=cached,
        )
    if num_cached:
        return because("ended", f"the cached sequence ends at token {num_cached}")
    return because("never_seen", f"nothing in namespace {namespace!r} begins with token {asked}")


def _next_token(tree: RadixTree, found: Match, namespace: Hashable) -> int | None:
    """A token that is cached after the match, if any."""
    if found.in_part:
        tokens = tree.tokens_of(found.page_ids.item(-1))
        at = found.num_tokens % tree.page_size
        return tokens.item(at) if at < tokens.size else None
    root = tree.roots.get(namespace_key(namespace))
    if root is None:
        return None
    pages = tree.child_pages(found.page_ids.item(-1) if found.num_tokens else root.last_page)
    return tree.tokens_of(pages[0]).item(0) if pages else None


@dataclass(frozen=True, slots=True)
class _Line:
    """One node, or a note on nodes that are left out, as both pictures show it."""

    depth: int
    is_last: bool
    node: Node | None
    note: str = ""


def _lines(tree: RadixTree, root: Root, max_depth: int | None) -> Iterator[_Line]:
    """Nodes from the top down, children in the order of their tokens; no recursion."""
    stack: list[_Line] = []

    def push(node: Node | Root, depth: int) -> None:
        children = tree.children(node)
        if not children:
            return
        if max_depth is not None and depth > max_depth:
            stack.append(_Line(depth, True, None, f"{len(children)} below"))
            return
        shown = children[:_SHOWN_CHILDREN]
        lines = [_Line(depth, False, child) for child in shown]
        if len(children) > len(shown):
            lines.append(_Line(depth, True, None, f"{len(children) - len(shown)} more"))
        elif lines:
            lines[-1] = _Line(depth, True, shown[-1])
        stack.extend(reversed(lines))

    push(root, 1)
    while stack:
        line = stack.pop()
        yield line
        if line.node is not None:
            push(line.node, line.depth + 1)


def _num_held(tree: RadixTree, node: Node) -> int:
    return int(np.count_nonzero(tree.pool.counts_of(node.page_ids) > 1))


def _facts(tree: RadixTree, node: Node, pinned: Any) -> list[str]:
    num_pages = node.page_ids.size
    facts = [
        _count(node.tokens.size, "token"),
        _count(num_pages, "page"),
        _count(node.num_hits, "use"),
        f"age {tree.clock - node.last_access}",
    ]
    held = _num_held(tree, node)
    if held:
        facts.append(f"{held} held")
    num_pinned = int(np.count_nonzero(pinned[node.page_ids]))
    if num_pinned:
        facts.append(f"{num_pinned} pinned")
    return facts


def _held(tree: RadixTree, root: Root) -> str:
    held = tree.held_below(root)
    return f"{_count(held.tokens, 'token')}, {_count(held.pages, 'page')}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _content(node: Node, tokenizer: Any, most: int) -> str:
    """The beginning of a node's text, or of its ids."""
    ids = node.tokens[: 4 * most]
    if tokenizer is None:
        text = " ".join(map(str, ids[:_SHOWN_IDS].tolist()))
        return text + (" ..." if node.tokens.size > _SHOWN_IDS else "")
    text = " ".join(tokenizer.decode(ids.tolist()).split())
    return text if len(text) <= most else text[:most] + "..."


def render(tree: RadixTree, max_depth: int | None, tokenizer: Any, pinned: Any, head: str) -> str:
    """The tree as text: a line a node, below a line for each namespace.

    Args:
        max_depth: edges below a namespace that are shown; None is all.
        tokenizer: shows text instead of token ids.
        pinned: whether each page is pinned. [num_pages + 1].
        head: the first line.
    """
    out = [head]
    for root in tree.roots.values():
        namespace = root.namespace
        name = "(no namespace)" if namespace is None else f"namespace {namespace!r}"
        out.append(f"{name}: {_held(tree, root)}")
        open_above: list[bool] = []  # by depth: whether more siblings follow below
        for line in _lines(tree, root, max_depth):
            del open_above[line.depth - 1 :]
            bars = "".join("│  " if more else "   " for more in open_above)
            branch = "└─ " if line.is_last else "├─ "
            open_above.append(not line.is_last)
            if line.node is None:
                out.append(f"{bars}{branch}... {line.note}")
                continue
            facts = ", ".join(_facts(tree, line.node, pinned))
            out.append(f"{bars}{branch}{facts}: {_content(line.node, tokenizer, _SHOWN_CHARS)}")
    return "\n".join(out)


_STYLE = """
:root { color-scheme: light dark; --line: #8886; --held: #c60; --pinned: #07c; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } details { margin: 1rem 0; } .namespace { font-weight: bold; }
table { border-collapse: collapse; } td { padding: .1rem .8rem .1rem 0; }
td + td { text-align: right; font-variant-numeric: tabular-nums; }
li { list-style: none; border-left: 1px solid var(--line); padding: .1rem 0 .1rem .7rem; }
ul.tree { padding: 0; }
.bar { display: inline-block; height: .6rem; background: #4a8; border-radius: .2rem; }
.facts { opacity: .75; font-variant-numeric: tabular-nums; }
.held { color: var(--held); } .pinned { color: var(--pinned); }
code { white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def to_html(
    tree: RadixTree, tokenizer: Any, pinned: Any, head: str, stats: dict[str, object]
) -> str:
    """The tree as one self-contained page: no script, nothing is loaded from elsewhere.

    Args: as `render`; ``stats`` are shown in a table above the tree.
    """
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_shown(value))}</td></tr>"
        for name, value in stats.items()
    )
    out = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>radixkv cache</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(head)}</h1>",
        f"<details><summary>Counters</summary><table>{rows}</table></details>",
    ]
    largest = max(
        (n.tokens.size for root in tree.roots.values() for n in tree.nodes(root)), default=1
    )
    for root in tree.roots.values():
        namespace = root.namespace
        name = "no namespace" if namespace is None else f"namespace {namespace!r}"
        held = f"<span class='facts'>{_held(tree, root)}</span>"
        out.append(f"<details open><summary class='namespace'>{html.escape(name)} {held}</summary>")
        out.append("<ul class='tree'>")
        for line in _lines(tree, root, None):
            # Indented, not nested: a browser lays out ten thousand levels of nesting badly.
            indent = f"style='margin-left:{min(line.depth - 1, 60) * 1.2:.1f}rem'"
            if line.node is None:
                out.append(f"<li {indent}>... {line.note}</li>")
                continue
            node = line.node
            facts = _facts(tree, node, pinned)
            kind = "pinned" if "pinned" in facts[-1] else "held" if "held" in facts[-1] else ""
            title = f"tokens {node.end - node.tokens.size} to {node.end} of a sequence"
            width = 1 + 140 * node.tokens.size / largest
            out.append(
                f"<li {indent} class='{kind}' data-end='{node.end}' title='{title}'>"
                f"<span class='bar' style='width:{width:.0f}px'></span> "
                f"<span class='facts'>{html.escape(', '.join(facts))}</span> "
                f"<code>{html.escape(_content(node, tokenizer, 200))}</code></li>"
            )
        out.append("</ul></details>")
    out.append("</body></html>\n")
    return "".join(out)


def _shown(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
