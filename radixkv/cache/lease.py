"""A sequence's use of a cache: its lease, and attention over many of them.

A page with more than one owner is never written: it is copied first. What is committed becomes
findable; what is not is freed on release.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.batch import AttentionBatch, ScoreRule
from radixkv.attention.plan import StepPlan
from radixkv.cache.core import CacheCore
from radixkv.cache.pool import PageIds
from radixkv.cache.tree import Tokens, decode_tokens
from radixkv.config import require_int
from radixkv.errors import CapacityError
from radixkv.names import safe_repr

_RULE_FIELDS = {field.name for field in fields(ScoreRule)} - {"softmax_scale"}


class Lease:
    """One sequence's pages; made by `PrefixCache.acquire` and `Lease.fork`.

    Release it, or use it as a context manager. One thread at a time may use a lease.
    """

    __slots__ = (
        "__weakref__",
        "_chunk_start",
        "_core",
        "_namespace",
        "_num_cached",
        "_num_pages",
        "_num_tokens",
        "_pages",
        "_plan",
        "_released",
        "_tokens",
        "_written",
    )

    def __init__(
        self,
        core: CacheCore,
        tokens: Tokens,
        page_ids: PageIds,
        num_cached: int,
        namespace: Hashable,
        written: list[int],
    ) -> None:
        self._core = core
        self._tokens = tokens  # room for more than are used
        self._num_tokens = tokens.size
        self._pages = page_ids  # as above
        self._num_pages = page_ids.size
        self._num_cached = num_cached
        self._namespace = namespace
        self._written = written  # tokens with KV, by layer
        self._chunk_start = written[0]  # tokens from here on came last: the queries of attend
        self._plan: tuple[int, StepPlan] | None = None  # of its last so many tokens
        self._released = False
        core.leases[id(self)] = weakref.ref(self)

    # --- what it is --------------------------------------------------------------------

    @safe_repr
    def __repr__(self) -> str:
        if self._released:
            return f"of {self._num_tokens:,} tokens, released"
        return (
            f"of {self._num_tokens:,} tokens on {self._num_pages:,} pages, "
            f"{self._num_cached:,} were cached, {min(self._written):,} have KV"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return self._num_tokens

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The sequence. [num_tokens] int64, a copy."""
        return decode_tokens(self._tokens[: self._num_tokens])

    @property
    def num_cached(self) -> int:
        """Tokens whose KV was found when the lease was acquired."""
        return self._num_cached

    @property
    def num_written(self) -> int:
        """Tokens from the beginning whose KV is known to be there in every layer."""
        return min(self._written)

    @property
    def namespace(self) -> Hashable:
        """The namespace that it was acquired in."""
        return self._namespace

    @property
    def is_released(self) -> bool:
        """Whether it was released."""
        return self._released

    @property
    def core(self) -> CacheCore:
        """The cache whose pages these are."""
        return self._core

    @property
    def page_ids(self) -> NDArray[np.int32]:
        """Page ids of the sequence, a copy. [ceil(num_tokens / page_size)] int32.

        `commit`, `extend`, `write` and `slot_mapping` may change them.
        """
        self._require_open()
        return self._pages[: self._num_pages].astype(np.int32)

    def slots(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Slots (page_id * page_size + offset) of tokens start to stop. [stop - start] int64."""
        self._require_open()
        num_tokens = self._num_tokens
        stop = num_tokens if stop is None else stop
        if not 0 <= start <= stop <= num_tokens:
            raise ValueError(
                f"slots: expected 0 <= start <= stop <= {num_tokens}, got {start}, {stop}"
            )
        page_size = self._core.page_size
        if stop - start == 1:
            page = self._pages.item(start // page_size)
            return np.array([page * page_size + start % page_size], dtype=np.int64)
        positions = np.arange(start, stop, dtype=np.int64)
        pages = self._pages[positions // page_size]
        return pages * page_size + positions % page_size

    @property
    def slot_mapping(self) -> Tensor:
        """Slots of the tokens that have no KV yet, free to be written. [n] int64, on the device.

        Shared pages among them are copied first. Valid until the next call on the lease.
        """
        self._require_open()
        core = self._core
        start = self.num_written
        self._make_own(start)
        return torch.from_numpy(self.slots(start)).to(core.device)

    # --- KV ----------------------------------------------------------------------------

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Quantize and store K and V of the tokens that have none yet in this layer.

        Args:
            k: [pending tokens, num_kv_heads, head_dim]; v: the same with v_head_dim.
        Raises:
            ValueError: another shape, or a layer that is not there.
            NonFiniteError: NaN or Inf in k or v, or a number that the pages cannot hold (above
                65504 in float16); the tokens count as not written.
            CapacityError: a shared page had to be copied and no page is left.
        """
        self._require_open()
        core = self._core
        layer_idx = require_layer(core, layer)
        start, stop = self._written[layer_idx], self.num_tokens
        spec = core.spec
        for name, rows, width in (("k", k, spec.head_dim), ("v", v, spec.v_head_dim)):
            shape = (stop - start, spec.num_kv_heads, width)
            require_floats(name, rows, core.device)
            if tuple(rows.shape) != shape:
                raise ValueError(
                    f"{name}: expected shape {list(shape)} (tokens {start} to {stop} have no KV "
                    f"in layer {layer_idx}), got {list(rows.shape)}"
                )
        if start == stop:
            return
        self._make_own(start)
        with core.guard:
            slots = torch.from_numpy(self.slots(start)).to(core.device)
            pages = core.storage.layer(layer_idx)
            core.backend.write_kv(pages, slots, k, v, layer_idx=layer_idx)
            core.backend.settle()
            self._written[layer_idx] = stop

    def mark_written(self, num_tokens: int | None = None) -> None:
        """Say that the KV of the first ``num_tokens`` (default: all) is there in every layer."""
        self._require_open()
        count = self.num_tokens if num_tokens is None else num_tokens
        count = require_int("num_tokens", count, 0, self.num_tokens)
        self._written = [max(count, written) for written in self._written]

    def attend(
        self, layer: int, q: Tensor, *, softmax_scale: float | None = None, **rule: Any
    ) -> Tensor:
        """Attend the sequence's last tokens to its pages, causally.

        Args:
            q: [new tokens, num_q_heads, head_dim]; the sequence's last ones.
            softmax_scale: factor on q.k; None is head_dim ** -0.5.
            rule: other fields of `radixkv.attention.batch.ScoreRule`.
        Returns:
            [new tokens, num_q_heads, v_head_dim], q's dtype.
        Raises:
            ValueError, TypeError: as `PrefixCache.attend_batch`.
        """
        return attend_batch(self._core, layer, q, [self], softmax_scale=softmax_scale, **rule)

    # --- growing, sharing, shrinking ---------------------------------------------------

    def extend(self, token_ids: Any) -> None:
        """Append tokens and take pages for them; all or nothing.

        A part-filled last page that others own too is copied, so that it can be written.

        Raises:
            CapacityError: no pages are left, even after eviction; the lease is as it was.

        Complexity: O(new tokens).
        """
        self._require_open()
        tokens = self._core.tree.encode(token_ids)
        if tokens.size:
            try:
                self.extend_encoded(tokens)
                return
            except CapacityError:
                if not self._core.collect_garbage():
                    raise
            self.extend_encoded(tokens)

    def extend_encoded(self, tokens: NDArray[np.int32]) -> None:
        """As `extend`, of at least one id that is known to be valid. [num_tokens] int32.

        For a caller who can wait: want of pages is said at once, without a look for garbage.
        """
        self._require_open()
        core = self._core
        old = self._num_tokens
        new = old + len(tokens)
        page_size = core.page_size
        more = -(-new // page_size) - self._num_pages
        if new > self._tokens.size:
            grown = np.empty(max(new, 2 * self._tokens.size), dtype=np.int32)
            grown[:old] = self._tokens[:old]
            self._tokens = grown
        self._tokens[old:new] = tokens
        # A page that this lease alone owns stays so whatever other threads do: no lock for it.
        if more or (old % page_size and core.pool.count(self._pages[self._num_pages - 1]) > 1):
            core.guard.enter()
            try:
                self._make_room(old, more)
                self._num_tokens = new  # here: other threads count pages and tokens
            finally:
                core.guard.leave()
        else:
            self._num_tokens = new
        if self.num_written == old:
            self._chunk_start = old
        self._plan = None

    def _make_room(self, old: int, more: int) -> None:
        """Append ``more`` pages; copy a part-filled last page of ``old`` tokens that is shared."""
        core = self._core
        tail = self._num_pages - 1
        in_part = old - tail * core.page_size
        copies = int(
            tail >= 0 and in_part < core.page_size and core.pool.count(self._pages[tail]) > 1
        )
        pages = core.allocate(more + copies, "extend")
        try:
            if copies:
                self._replace(tail, int(pages[-1]), in_part)
                pages = pages[:more]
            if more:
                self._append(pages)
        except BaseException:
            core.pool.drop(pages)  # those that are not the lease's yet
            raise

    def fork(self) -> Lease:
        """A second lease on the same pages; nothing is copied until one of them writes."""
        self._require_open()
        core = self._core
        with core.guard:
            pages = self._pages[: self._num_pages].copy()
            tokens, written = self._tokens[: self._num_tokens].copy(), list(self._written)
            core.pool.hold(pages)
            other = Lease(core, tokens, pages, self._num_cached, self._namespace, written)
            other._chunk_start = self._chunk_start
            return other

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` tokens; pages past them are given back."""
        self._require_open()
        num_tokens = require_int("num_tokens", num_tokens, 0, self.num_tokens)
        core = self._core
        with core.guard:
            keep = -(-num_tokens // core.page_size)
            gone = self._pages[keep : self._num_pages].copy()
            self._num_pages = keep
            self._num_tokens = num_tokens
            self._written = [min(num_tokens, written) for written in self._written]
            self._num_cached = min(num_tokens, self._num_cached)
            self._chunk_start = min(num_tokens, self._chunk_start)
            self._plan = None
            if gone.size:
                core.pool.drop(gone)

    def commit(
        self,
        num_tokens: int | None = None,
        *,
        priority: int | None = None,
        ttl: float | None = None,
    ) -> None:
        """Make the first tokens findable; call it again as the sequence grows.

        Pages that the tree has already are given back in favour of the tree's.

        Args:
            num_tokens: tokens whose KV is there, said by a caller who wrote the slots; None is
                all that `write` has stored in every layer.
            priority: for ``eviction="priority"``: smaller goes first.
            ttl: seconds after which the priority falls to the smallest.
        """
        self._require_open()
        if num_tokens is None:
            num_tokens = self.num_written
        else:
            if type(num_tokens) is not int or not 0 <= num_tokens <= self._num_tokens:
                num_tokens = require_int("num_tokens", num_tokens, 0, self._num_tokens)
            if num_tokens > min(self._written):
                self._written = [max(num_tokens, written) for written in self._written]
        core = self._core
        core.guard.enter()
        try:
            if not num_tokens:
                return
            changed = core.tree.insert(
                self._tokens,
                self._pages,
                self._namespace,
                num_tokens=num_tokens,
                # Its last page may hold tokens that the tree's page has not.
                own_last=num_tokens == self._num_tokens,
                priority=priority,
                expires=None if ttl is None else core.now() + ttl,
            )
            if changed:
                self._plan = None
        finally:
            core.guard.leave()

    def release(self) -> None:
        """Give the pages back; committed ones stay cached. Calling it again does nothing."""
        if self._released:
            return
        self._released = True
        self._core.give_back(self._pages[: self._num_pages], id(self))

    def abandon(self) -> None:
        """As `release`, from a destructor: it waits for no other thread.

        While another call on the cache runs, the pages go back with the next one.
        """
        if self._released:
            return
        self._released = True
        core = self._core
        core.give_back_unwaiting(self._pages[: self._num_pages], id(self))

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # May run at any moment, also inside another cache call: never wait. When the interpreter
        # ends, modules are empty, and nobody wants the pages back.
        if not getattr(self, "_released", True) and not _is_ending():
            self.abandon()
            warnings.warn(
                f"a lease of {self.num_tokens} tokens was dropped without release(); "
                f"release it or use it as a context manager",
                ResourceWarning,
                stacklevel=2,
            )

    # --- inside ------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._released:
            raise ValueError("lease: was released; acquire a new one")

    def _append(self, pages: PageIds) -> None:
        need = self._num_pages + pages.size
        if need > self._pages.size:
            grown = np.zeros(max(need, 2 * self._pages.size), dtype=np.int64)
            grown[: self._num_pages] = self._pages[: self._num_pages]
            self._pages = grown
        self._pages[self._num_pages : need] = pages
        self._num_pages = need

    def _replace(self, index: int, page_id: int, num_tokens: int) -> None:
        """Copy the page at ``index`` to ``page_id``, which takes its place."""
        core = self._core
        old = self._pages[index : index + 1].copy()
        core.storage.copy_page(int(old[0]), page_id, num_tokens)
        core.cow_copies += 1
        self._pages[index] = page_id
        core.pool.drop(old)
        self._plan = None

    def _make_own(self, start: int) -> None:
        """As `_own`, outside of the lock; for want of pages once more after collecting garbage."""
        core = self._core
        try:
            with core.guard:
                self._own(start)
            return
        except CapacityError:
            if not core.collect_garbage():
                raise
        with core.guard:
            self._own(start)

    def _own(self, start: int) -> None:
        """Make the pages of tokens from ``start`` on this lease's alone."""
        core = self._core
        page_size = core.page_size
        first = start // page_size
        if start >= self.num_tokens:
            return
        pages = self._pages[first : self._num_pages]
        shared = np.flatnonzero(core.pool.counts_of(pages) > 1)
        if not shared.size:
            return
        fresh = core.allocate(shared.size, "write")
        for n, i in enumerate((shared + first).tolist()):
            try:
                self._replace(i, int(fresh[n]), min(page_size, self.num_tokens - i * page_size))
            except BaseException:
                core.pool.drop(fresh[n:])
                raise


def require_floats(name: str, rows: object, device: torch.device) -> None:
    """Raise unless ``rows`` is a float tensor on the cache's device."""
    if not isinstance(rows, Tensor) or not rows.is_floating_point():
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"{name}: expected a floating-point tensor, got {got}; convert it first")
    if rows.device.type != device.type:
        raise ValueError(
            f"{name}: expected a tensor on {device}, where the cache is, got one on {rows.device}"
        )


def require_layer(core: CacheCore, layer: int) -> int:
    """``layer``, if the cache has it."""
    return require_int("layer", layer, 0, core.spec.num_layers - 1)


def attend_batch(
    core: CacheCore,
    layer: int,
    q: Tensor,
    leases: Sequence[Lease],
    *,
    query_lens: Sequence[int] | None = None,
    softmax_scale: float | None = None,
    **rule: Any,
) -> Tensor:
    """See `radixkv.PrefixCache.attend_batch`."""
    layer_idx = require_layer(core, layer)
    if softmax_scale is None:
        softmax_scale = core.spec.head_dim**-0.5
    unknown = rule.keys() - _RULE_FIELDS
    if unknown:
        raise TypeError(
            f"attend: expected fields of ScoreRule ({', '.join(sorted(_RULE_FIELDS))}), got "
            f"{', '.join(sorted(unknown))}; remove or rename them"
        )
    score_rule = ScoreRule(softmax_scale=softmax_scale, **rule)
    require_floats("q", q, core.device)
    spec = core.spec
    if (
        q.ndim != 3
        or q.shape[2] != spec.head_dim
        or q.shape[1] % spec.num_kv_heads
        or (not q.shape[1])
    ):
        raise ValueError(
            f"q: expected shape [tokens, a multiple of {spec.num_kv_heads} heads, "
            f"{spec.head_dim}], got {list(q.shape)}"
        )
    score_rule.require_heads(q.shape[1], q.device)
    for lease in leases:
        if not isinstance(lease, Lease):
            raise TypeError(f"leases: expected leases, got {lease!r}; use cache.acquire()")
    if query_lens is not None:
        query_lens = [require_int("query_lens", rows, 0) for rows in query_lens]
    elif len(leases) == 1:
        query_lens = [q.shape[0]]
    else:
        query_lens = [lease.num_tokens - lease._chunk_start for lease in leases]
    if not leases or len(query_lens) != len(leases) or sum(query_lens) != q.shape[0]:
        raise ValueError(
            f"q: expected {list(query_lens)} rows for {len(leases)} leases, got {q.shape[0]}; "
            f"say how many are whose with query_lens"
        )
    with core.guard:
        _require_readable(core, layer_idx, leases, query_lens)
        plan = _plan_of(core, leases, query_lens)
        pages = core.storage.layer(layer_idx)
    return plan.attend(pages, q, score_rule)


def _require_readable(
    core: CacheCore, layer_idx: int, leases: Sequence[Lease], query_lens: Sequence[int]
) -> None:
    """Raise unless the last so many tokens of each lease can attend in this layer."""
    for lease, rows in zip(leases, query_lens, strict=True):
        lease._require_open()
        if lease._core is not core:
            raise ValueError("leases: expected leases of this cache, got another's")
        if lease._written[layer_idx] < lease.num_tokens:
            raise ValueError(
                f"attend: {lease._written[layer_idx]} of {lease.num_tokens} tokens have KV in "
                f"layer {layer_idx}; write() the rest, or mark_written() if they are there"
            )
        if not 1 <= rows <= lease.num_tokens:
            raise ValueError(f"q: expected 1 to {lease.num_tokens} rows of a lease, got {rows}")


def _plan_of(core: CacheCore, leases: Sequence[Lease], query_lens: Sequence[int]) -> StepPlan:
    """One plan for all layers of a step; a single lease keeps its own until it changes."""
    if len(leases) > 1:
        return core.backend.plan(attention_batch(core, leases, query_lens))
    lease, rows = leases[0], query_lens[0]
    known = lease._plan
    if known is None or known[0] != rows:
        plan = core.backend.plan(attention_batch(core, leases, query_lens))
        known = lease._plan = (rows, plan)
    return known[1]


def attention_batch(
    core: CacheCore, leases: Sequence[Lease], query_lens: Sequence[int]
) -> AttentionBatch:
    """The last tokens of many sequences as a batch, ``query_lens`` of each."""
    slots = [
        lease.slots(lease.num_tokens - rows) for lease, rows in zip(leases, query_lens, strict=True)
    ]
    seq_lens = np.array([lease.num_tokens for lease in leases], dtype=np.int64)
    starts = np.cumsum([0, *query_lens], dtype=np.int32)

    def on_device(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(core.device)

    page_ids = [lease.page_ids for lease in leases]
    table, runs = core.page_tables.lay_out(page_ids, (seq_lens - query_lens) // core.page_size)
    return AttentionBatch(
        slot_mapping=on_device(np.concatenate(slots)),
        page_table=on_device(table),
        seq_lens=on_device(seq_lens.astype(np.int32)),
        cu_seqlens_q=on_device(starts),
        runs=runs,
        known_lens=(seq_lens.tolist(), starts.tolist()),
    )
