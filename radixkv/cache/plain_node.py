"""A node of the plain tree: the tokens of one page, and its children in their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from sortedcontainers import SortedDict

TOKEN = np.dtype(">i4")  # as bytes, tokens sort as they do as numbers: the highest byte is first
TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class PageNode:
    """A page of the tree, or the root of a namespace, which has children alone.

    Attributes:
        key: its tokens, as bytes of `TOKEN`.
        page_id: of a root a negative number, its row.
        parent: None is a root's.
        depth: pages before it in its sequence; -1 is a root's.
        children: by their keys, and in their order.
        last_access, num_hits: clock of the last use; how many there were.
        priority, expires: and when it falls to `EXPIRED`; None is never.
        is_tail: whether it stands among `PlainPool.tails`.
    """

    key: bytes
    page_id: int
    parent: PageNode | None = field(repr=False)
    depth: int
    children: dict[bytes, PageNode] = field(default_factory=dict, repr=False)
    last_access: int = 0
    num_hits: int = 0
    priority: int = 0
    expires: float | None = None
    is_tail: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that it holds."""
        return len(self.key) // TOKEN_BYTES


def num_shared(a: bytes, b: bytes) -> int:
    """How many tokens two keys share from their beginning. Complexity: O(len(a)), in bulk.

    >>> num_shared(b"\\0\\0\\0\\1" b"\\0\\0\\0\\2", b"\\0\\0\\0\\1" b"\\0\\0\\0\\7" b"\\0\\0\\0\\3")
    1
    """
    size = min(len(a), len(b))
    differ = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (differ.bit_length() + 7) // 8) // TOKEN_BYTES


def add_child(parent: PageNode, node: PageNode) -> None:
    """Hang a node below another. Complexity: O(log(siblings)).

    A single child, as most are, needs no order: a plain dict takes a tenth of the room.
    """
    if len(parent.children) == 1 and type(parent.children) is dict:
        parent.children = SortedDict(parent.children)
    parent.children[node.key] = node


def closest_child(parent: PageNode, key: bytes) -> tuple[PageNode | None, int]:
    """The child that shares the most tokens with ``key``, and how many; or None, 0.

    Of two that share as many it is the one before the place where ``key`` would stand.

    Complexity: O(1) for a child with that very key; else O(log(children)).
    """
    children = parent.children
    node = children.get(key)
    if node is not None:
        return node, len(key) // TOKEN_BYTES
    near: Iterable[PageNode] = children.values()
    if isinstance(children, SortedDict):
        after = children.bisect_left(key)
        keys = children.keys()[max(0, after - 1) : after + 1]
        near = [children[name] for name in keys]
    best, most = None, 0
    for node in near:
        shared = num_shared(node.key, key)
        if shared > most:
            best, most = node, shared
    return best, most
