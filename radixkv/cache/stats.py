"""What a cache holds at one moment, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.cache.tree import NamespaceStats


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """One moment of a cache; pages_free + cached + pinned + private = total.

    Attributes:
        capacity_bytes: bytes of all usable pages.
        bytes_per_token: bytes that a token takes in all layers, scales included.
        pages_total, pages_free: usable pages; those without an owner.
        pages_cached: in the tree alone, hence evictable.
        pages_pinned: in the tree and held by a lease or pin.
        pages_private: held by leases alone.
        lookups, lookup_tokens, hit_tokens: acquires so far, their tokens, those found.
        hit_rate: hit_tokens / lookup_tokens; 0 before the first lookup.
        evicted_pages: pages evicted so far.
        cow_copies: pages copied so far because they were shared or matched in part.
        shared_bytes_saved: bytes that owners of shared pages would need for own copies, now.
        nodes: nodes of the tree.
        utilization: tokens stored / token slots in used pages; 0 when none is used.
        namespaces: pages and tokens of each namespace that has some cached.
    """

    capacity_bytes: int
    bytes_per_token: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_pinned: int
    pages_private: int
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    hit_rate: float
    evicted_pages: int
    cow_copies: int
    shared_bytes_saved: int
    nodes: int
    utilization: float
    namespaces: tuple[NamespaceStats, ...]
