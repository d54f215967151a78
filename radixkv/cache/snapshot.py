"""Snapshots: what a cache holds, as one file that is whole or is not there.

Which nodes and pages go into a file, and how those of a file come into a tree. The file itself
is read and written by `radixkv.cache.snapshot_file`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.layout import LayerPages
from radixkv.cache.pool import NULL_PAGE, PageIds, PagePool
from radixkv.cache.snapshot_file import (
    SAVED_EXPIRED,
    PathLike,
    SavedTree,
    Snapshot,
    Tell,
    encode_namespace,
    layout_of,
    require_equal,
    write,
)
from radixkv.cache.tree import EXPIRED, Node, RadixTree, Root, Tokens, common_prefix, namespace_key
from radixkv.cache.tree_choice import make_tree
from radixkv.disk import replacing
from radixkv.progress import shown_progress


class _Kept(NamedTuple):
    """A node to be saved: how many tokens of its edge, and the row of the node above."""

    node: Node
    size: int
    above: int


def tree_namespaces(tree: RadixTree) -> list[Hashable]:
    """The namespaces that a tree has."""
    return [root.namespace for root in tree.roots.values()]


def collect(
    tree: RadixTree,
    *,
    namespaces: Iterable[Hashable],
    prefixes: Iterable[Tokens] | None,
    now: float,
) -> tuple[SavedTree, PageIds]:
    """The saved form of a tree, and the ids of its pages in the order of the file.

    Args:
        namespaces: those to save; the ones that are not there are left out.
        prefixes: encoded tokens: only what begins so, and what is cached of these themselves.
        now: the clock of ``Node.expires``, in seconds.
    Raises:
        SnapshotError: a namespace that cannot be saved.

    Complexity: O(nodes * log(nodes)), plus prefixes * the children on their way.
    """
    wanted = None if prefixes is None else list(prefixes)
    names: list[Hashable] = []
    kept: list[_Kept] = []
    for namespace in namespaces:
        root = tree.roots.get(namespace_key(namespace))
        if root is None:
            continue
        encode_namespace(namespace)  # raises here, before anything is written
        names.append(namespace)
        stack: list[tuple[Node | Root, int, list[Tokens] | None]] = [(root, -len(names), wanted)]
        while stack:
            node, above, rests = stack.pop()
            for child, size, further in _choose(tree.children(node), rests):
                stack.append((child, len(kept), further))
                kept.append(_Kept(child, size, above))
    access = np.array([item.node.last_access for item in kept], dtype=np.int64)
    for row in range(len(kept) - 1, -1, -1):  # a use of a node is one of those above it
        above = kept[row].above
        if above >= 0:
            access[above] = max(access[above], access[row])
    order = np.argsort(-access, kind="stable")
    place = np.empty(len(kept), dtype=np.int64)
    place[order] = np.arange(len(kept))
    rows = [kept[i] for i in order]
    nodes = [item.node for item in rows]
    low, high = -(2**63), 2**63 - 1
    ranks = np.unique(access, return_inverse=True)[1][order]
    ttls = [math.nan if n.expires is None else max(0.0, n.expires - now) for n in nodes]
    pages = [n.page_ids[: -(-size // tree.page_size)] for n, size, _ in rows]
    edges = [node.tokens[:size] for node, size, _ in rows]
    priorities = [
        SAVED_EXPIRED if n.priority == EXPIRED else max(n.priority, low + 1) for n in nodes
    ]
    saved = SavedTree(
        tree.page_size,
        tuple(names),
        parent=np.array([a if a < 0 else place[a] for _, _, a in rows], dtype=np.int32),
        length=np.array([size for _, size, _ in rows], dtype=np.uint32),
        tokens=b"".join(edge.astype(">u4").tobytes() for edge in edges),
        last_access=ranks.astype(np.uint32),
        num_hits=np.array([min(node.num_hits, high) for node in nodes], dtype=np.int64),
        priority=np.array(priorities, dtype=np.int64),
        ttl_s=np.array(ttls, dtype=np.float64),
    )
    return saved, np.concatenate([np.empty(0, dtype=np.int64), *pages])


def _choose(
    children: list[Node], rests: list[Tokens] | None
) -> list[tuple[Node, int, list[Tokens] | None]]:
    """Which children to save, how many tokens of each, and what is left of the prefixes below.

    ``rests`` is what of the prefixes follows the node above; None keeps all.
    """
    if rests is None:
        return [(child, child.tokens.size, None) for child in children]
    whole: set[int] = set()
    parts: dict[int, int] = {}
    further: dict[int, list[Tokens]] = {}
    for rest in rests:
        # All that goes on from the prefix, or is it; else the one that shares the most with it.
        shares = [common_prefix(child.tokens, rest) for child in children]
        below = [i for i, shared in enumerate(shares) if shared == rest.size]
        whole.update(below)
        if below or not children:
            continue
        best = max(range(len(children)), key=shares.__getitem__)
        shared = shares[best]
        if shared:
            parts[best] = max(shared, parts.get(best, 0))
        if shared == children[best].tokens.size:
            further.setdefault(best, []).append(rest[shared:])
    chosen: list[tuple[Node, int, list[Tokens] | None]] = [
        (children[i], children[i].tokens.size, None) for i in sorted(whole)
    ]
    chosen += [(children[i], parts[i], further.get(i, [])) for i in parts if i not in whole]
    return chosen


# --- pages as bytes ------------------------------------------------------------------------


class PageBytes:
    """The pages of a storage as rows of bytes: a page's bytes in all layers, one after another.

    Args:
        pages: of all layers, [num_layers, num_pages, num_kv_heads, page_size, width] each.
    """

    def __init__(self, pages: LayerPages) -> None:
        self._parts: list[tuple[Any, int, int, tuple[int, int, int, int]]] = []
        at = 0
        for tensor in pages:
            if not tensor.numel():
                continue
            layers, count, heads, page_size, width = tensor.shape
            width *= tensor.dtype.itemsize
            flat: Any = tensor.view(torch.uint8).reshape(layers, count, -1)
            stop = at + layers * heads * page_size * width
            shape = (layers, heads, page_size, width)
            self._parts.append(
                (flat.numpy() if flat.device.type == "cpu" else flat, at, stop, shape)
            )
            at = stop
        self.page_bytes = at

    def read(self, page_ids: PageIds, fills: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Copy pages to the rows of ``out``; rows of tokens from ``fills`` on become zeros."""
        part_filled = None
        for flat, start, stop, shape in self._parts:
            layers, _, page_size, _ = shape
            if part_filled is None:
                part_filled = np.flatnonzero(fills < page_size).tolist()
            target = out[:, start:stop].reshape(len(page_ids), layers, -1)
            if isinstance(flat, np.ndarray):
                for i, page_id in enumerate(page_ids.tolist()):
                    target[i] = flat[:, page_id]
            else:
                ids = torch.from_numpy(page_ids.copy()).to(flat.device)
                target[...] = flat[:, ids].cpu().numpy().transpose(1, 0, 2)
            for i in part_filled:
                out[i, start:stop].reshape(shape)[:, :, int(fills[i]) :] = 0

    def write(self, page_ids: PageIds, rows: NDArray[np.uint8]) -> None:
        """Copy the rows to pages."""
        for flat, start, stop, shape in self._parts:
            source = rows[:, start:stop].reshape(len(page_ids), shape[0], -1)
            if isinstance(flat, np.ndarray):
                for i, page_id in enumerate(page_ids.tolist()):
                    flat[:, page_id] = source[i]
            else:
                ids = torch.from_numpy(page_ids.copy()).to(flat.device)
                block = np.ascontiguousarray(source.transpose(1, 0, 2))
                flat[:, ids] = torch.from_numpy(block).to(flat.device)


def merge(target: PathLike, sources: Iterable[PathLike], *, progress: bool = False) -> int:
    """Write one snapshot of what several hold, without a cache; what they share once.

    Sequences of a later file count as more recently used than those of the ones before.

    Args:
        target: the new file; it may be one of the sources.
        sources: snapshots of one model, geometry and KV format.
    Returns:
        pages written.
    Raises:
        SnapshotError: one is damaged, or not of the same kind as the first; nothing is written.
        OSError: a file cannot be read or written.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(Snapshot(path)) for path in sources]
        first = files[0]
        for file in files[1:]:
            where = str(file.path)
            require_equal(where, "geometry or KV format", file.layout, first.layout)
            require_equal(where, "model", file.fingerprint, first.fingerprint)
        tree = make_tree(first.page_size, sum(file.num_pages for file in files))
        pool = tree.pool
        source_of = np.zeros((pool.num_pages + 1, 2), dtype=np.int64)  # of a page: file, place

        for number, file in enumerate(files):

            def note(page_ids: PageIds, places: NDArray[np.int64], number: int = number) -> None:
                source_of[page_ids, 0], source_of[page_ids, 1] = number, places

            _graft(file, tree, pool, note, eviction="lru", now=0.0)
        saved, page_ids = collect(tree, namespaces=tree_namespaces(tree), prefixes=None, now=0.0)

        def fill_rows(piece: slice, rows: NDArray[np.uint8]) -> None:
            for i, (number, place) in enumerate(source_of[page_ids[piece]].tolist()):
                for _, found, good in files[number].pages(np.array([place])):
                    if not good.all():
                        raise files[number].damaged(f"page {place} has another checksum")
                    rows[i] = found[0]

        tell = stack.enter_context(shown_progress("merging", progress))
        with replacing(target) as out:
            write(out, first.layout, first.fingerprint, saved, fill_rows, tell)
        return len(page_ids)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What `PrefixCache.load` did.

    Attributes:
        tokens: tokens that the tree has more than before.
        pages: pages that they took.
        left_out_pages: pages of the snapshot for which no page was free.
        damaged_pages: with ``salvage``: pages that were damaged, or came after such.
    """

    tokens: int
    pages: int
    left_out_pages: int = 0
    damaged_pages: int = 0


def graft(
    snapshot: Snapshot,
    tree: RadixTree,
    pool: PagePool,
    put: Callable[[PageIds, NDArray[np.uint8]], None],
    *,
    eviction: str,
    now: float,
    salvage: bool = False,
    tell: Tell = lambda done, total: None,
) -> Loaded:
    """Insert what a snapshot holds, into free pages alone; all or nothing.

    What does not fit is left out, the least recently used first; a sequence that is left out
    in part keeps its beginning. Nothing is evicted, so nothing is lost if a page turns out to
    be damaged half way. What the tree has already is not read.

    Args:
        put: copies rows of bytes to pages.
        eviction: policy of the tree: which uses have to be repeated.
        salvage: leave out what is damaged, and what goes on from it, instead of raising.
    Raises:
        SnapshotError: a page is damaged; the tree is as it was.
    """
    bad: list[int] = []

    def copy(page_ids: PageIds, places: NDArray[np.int64]) -> None:
        for piece, rows, good in snapshot.pages(places):
            if not good.all():
                bad.extend(places[piece][~good].tolist())
                if not salvage:
                    raise snapshot.damaged(f"page {bad[0]} has another checksum")
            put(page_ids[piece], rows)
            tell(piece.stop, len(places))

    return _graft(snapshot, tree, pool, copy, bad=bad, eviction=eviction, now=now)


def _graft(
    snapshot: Snapshot,
    tree: RadixTree,
    pool: PagePool,
    fetch: Callable[[PageIds, NDArray[np.int64]], None],
    *,
    eviction: str,
    now: float,
    bad: list[int] | None = None,
) -> Loaded:
    """`graft`, where ``fetch`` sees to it that pages hold those of the file at given places.

    ``bad`` lists, after that, the places that could not be read.
    """
    saved = snapshot.tree
    keep, have = _plan(saved, tree, pool.num_free)
    wanted = _places(saved, have, keep)
    pages_of = np.zeros(snapshot.num_pages, dtype=np.int64)
    mine = pool.allocate(len(wanted))
    pages_of[wanted] = mine
    before = tree.num_tokens
    try:
        fetch(mine, wanted)
        lost = _drop_damaged(saved, keep, np.array(bad or (), dtype=np.int64))
        own_hits = _own_hits(saved, keep)
        for row in _uses(saved, keep, own_hits, eviction).tolist():
            _insert(saved, row, keep, pages_of, tree, now)
            if own_hits[row] > 1:
                tree.credit(tree.end_page, int(own_hits[row]) - 1)
        pages = int(np.count_nonzero(pool.in_tree[mine]))
    finally:
        pool.drop(pages_of[pages_of != NULL_PAGE])
    planned = int(saved.num_pages.sum()) - int(have.sum())
    return Loaded(
        tokens=tree.num_tokens - before,
        pages=pages,
        left_out_pages=planned - len(wanted),
        damaged_pages=lost,
    )


def _plan(
    saved: SavedTree, tree: RadixTree, room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many pages of each node to keep, and how many of those the tree has."""
    keep, have = np.zeros((2, len(saved)), dtype=np.int64)
    merges = [namespace_key(namespace) in tree.roots for namespace in saved.namespaces]
    page_size = saved.page_size
    for row in range(len(saved)):
        above, count = int(saved.parent[row]), int(saved.num_pages[row])
        if above >= 0 and keep[above] < saved.num_pages[above]:
            continue  # what comes before it was left out
        if any(merges):
            namespace, rows = saved.path(row)
            tokens = np.concatenate([saved.edge(r) for r in rows])
            found = tree.match(tokens, namespace).num_tokens
            first = int(saved.num_pages[rows[:-1]].sum())
            whole = found == tokens.size
            have[row] = count if whole else min(count, max(0, found // page_size - first))
        keep[row] = have[row] + min(count - int(have[row]), room)
        room -= int(keep[row] - have[row])
    return keep, have


def _places(
    saved: SavedTree, start: NDArray[np.int64], stop: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The places in the file of pages ``start`` to ``stop`` of every node, ascending."""
    return _runs(saved.first_page + start, stop - start)


def _runs(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """``count[i]`` numbers from ``first[i]`` on, for every i."""
    ends = np.cumsum(count)
    runs: NDArray[np.int64] = np.repeat(first - ends + count, count) + np.arange(count.sum())
    return runs


def _drop_damaged(saved: SavedTree, keep: NDArray[np.int64], bad: NDArray[np.int64]) -> int:
    """Cut nodes before their first damaged page, in place; returns how many pages that loses."""
    if not bad.size:
        return 0
    before = int(keep.sum())
    rows = np.searchsorted(saved.first_page, bad, side="right") - 1
    np.minimum.at(keep, rows, bad - saved.first_page[rows])
    for row in range(len(saved)):
        above = int(saved.parent[row])
        if above >= 0 and keep[above] < saved.num_pages[above]:
            keep[row] = 0
    return before - int(keep.sum())


def _uses(
    saved: SavedTree, keep: NDArray[np.int64], own_hits: NDArray[np.int64], eviction: str
) -> NDArray[np.int64]:
    """The rows whose insertion, in this order, repeats the order in which all were used.

    A use of a sequence is one of all nodes above its end, so ends of uses are nodes that were
    used after all their children. Counts and priorities may ask for more.
    """
    kept = keep > 0
    child = np.flatnonzero(kept & (saved.parent >= 0))
    above = saved.parent[child]
    latest = np.full(len(saved), -1, dtype=np.int64)
    np.maximum.at(latest, above, saved.last_access[child])
    ends = saved.last_access > latest
    if eviction == "lfu":
        ends |= own_hits > 0
    if eviction == "priority":
        for column in (saved.priority, np.nan_to_num(saved.ttl_s, nan=-1.0)):
            highest = np.full(len(saved), -np.inf)
            np.maximum.at(highest, above, column[child])
            ends |= column != highest
    rows = np.flatnonzero(kept & ends)
    return rows[np.lexsort((-rows, saved.last_access[rows]))]


def _own_hits(saved: SavedTree, keep: NDArray[np.int64]) -> NDArray[np.int64]:
    """Uses of each node that ended there."""
    own = saved.num_hits.copy()
    child = np.flatnonzero((keep > 0) & (saved.parent >= 0))
    np.subtract.at(own, saved.parent[child], saved.num_hits[child])
    return own


def _insert(
    saved: SavedTree,
    row: int,
    keep: NDArray[np.int64],
    pages_of: PageIds,
    tree: RadixTree,
    now: float,
) -> None:
    """Insert a node's sequence, as far as it is kept.

    ``pages_of`` has for each place in the file a page that is held, or 0 where the tree has it
    already; of the sequence's, all are the tree's own and held afterwards.
    """
    namespace, rows = saved.path(row)
    tokens = np.concatenate([saved.edge(r) for r in rows])
    first, count = saved.first_page[rows], saved.num_pages[rows].copy()
    cut = int(count[-1] - keep[row])
    if cut:
        count[-1] -= cut
        tokens = tokens[: int(count.sum()) * saved.page_size]
    places = _runs(first, count)
    page_ids = pages_of[places]
    missing = np.flatnonzero(page_ids == NULL_PAGE)
    if missing.size:
        page_ids[missing] = tree.match(tokens, namespace).page_ids[missing]
        tree.pool.hold(page_ids[missing])
    priority, ttl_s = int(saved.priority[row]), float(saved.ttl_s[row])
    expires = None if math.isnan(ttl_s) else now + ttl_s
    if priority == SAVED_EXPIRED:  # let it expire again
        priority, expires = 0, now
    plain = priority == 0 and expires is None
    tree.insert(
        tokens,
        page_ids,
        namespace,
        priority=None if plain else priority,
        expires=expires,
    )
    pages_of[places] = page_ids


__all__ = [
    "Loaded",
    "PageBytes",
    "Snapshot",
    "collect",
    "graft",
    "layout_of",
    "merge",
    "replacing",
    "require_equal",
    "shown_progress",
    "tree_namespaces",
    "write",
]
