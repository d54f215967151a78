"""Shared runs: groups of pages that sequences share, and attention that reads them once."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention import cpu as cpu_backend
from radixkv.attention import reference
from radixkv.attention import sharing_cost as costs
from radixkv.attention.backend import get_backend
from radixkv.attention.batch import KVReads, ScoreRule
from radixkv.attention.formats import hadamard
from radixkv.attention.layout import KVCodec, KVSpec
from radixkv.attention.shared_runs import PageTables, SharedRun, find_runs
from radixkv.cache.lease import Lease, attention_batch
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import KVConfig
from radixkv.engine.engine import Engine
from radixkv_kernels.cpu import launch, plan


def random_forest(rng: np.random.Generator, num_seqs: int, depth: int, fan_out: int):
    """Page tables of sequences that fork and fork again, in random order; pages seen by each."""
    next_page = 1
    tables: list[list[int]] = []

    def fresh(count: int) -> list[int]:
        nonlocal next_page
        next_page += count
        return list(range(next_page - count, next_page))

    def grow(prefix: list[int], level: int, leaves: int) -> None:
        prefix = prefix + fresh(int(rng.integers(0, 5)))
        if level == depth or leaves == 1:
            tables.extend(prefix + fresh(int(rng.integers(0, 4))) for _ in range(leaves))
            return
        children = int(rng.integers(1, min(fan_out, leaves) + 1))
        cuts = np.sort(rng.integers(0, leaves + 1, children - 1)).tolist()
        for low, high in zip([0, *cuts], [*cuts, leaves], strict=True):
            if high > low:
                grow(prefix, level + 1, high - low)

    left = num_seqs
    while left:
        leaves = int(rng.integers(1, left + 1))
        grow([], 0, leaves)
        left -= leaves
    rng.shuffle(tables)
    width = max(1, *map(len, tables))
    page_table = np.zeros((num_seqs, width), np.int32)
    num_pages = np.zeros(num_seqs, np.int64)
    for i, table in enumerate(tables):
        page_table[i, : len(table)] = table
        num_pages[i] = rng.integers(0, len(table) + 1) if rng.random() < 0.3 else len(table)
    return page_table, num_pages


def sharers(page_table: np.ndarray, num_pages: np.ndarray, seq: int, column: int) -> list[int]:
    """By brute force: who begins with the same pages, up to this one."""
    mine = page_table[seq, : column + 1].tolist()
    return [
        other
        for other in range(len(page_table))
        if num_pages[other] > column and page_table[other, : column + 1].tolist() == mine
    ]


@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(0, 5), st.integers(1, 8))
def test_runs_are_what_brute_force_finds(seed, num_seqs, depth, fan_out) -> None:
    page_table, num_pages = random_forest(np.random.default_rng(seed), num_seqs, depth, fan_out)
    owner: dict[tuple[int, int], SharedRun] = {}
    for run in find_runs(page_table, num_pages):
        for seq in run.seqs.tolist():
            for column in range(run.start, run.stop):
                assert (seq, column) not in owner, "runs are disjoint"
                owner[seq, column] = run
    for seq in range(num_seqs):
        for column in range(num_pages[seq]):
            expected = sharers(page_table, num_pages, seq, column)
            run = owner.get((seq, column))
            if len(expected) < 2:
                assert run is None
            else:
                assert run is not None, "runs cover what is shared"
                assert sorted(run.seqs.tolist()) == expected
    assert all(column < num_pages[seq] for seq, column in owner)


@given(
    st.integers(0, 2**32),
    st.integers(1, 24),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(2, 5),
)
def test_thresholds_leave_runs_nested_and_without_gaps(
    seed, num_seqs, depth, min_pages, min_seqs
) -> None:
    page_table, num_pages = random_forest(np.random.default_rng(seed), num_seqs, depth, 6)
    runs = find_runs(page_table, num_pages, min_pages=min_pages, min_seqs=min_seqs)
    for run in runs:
        assert len(run.seqs) >= min_seqs
        assert run.stop - run.start >= min_pages
        columns = page_table[run.seqs, : run.stop]
        assert (columns == columns[0]).all()
        assert (num_pages[run.seqs] >= run.stop).all()
    for seq in range(num_seqs):
        mine = [run for run in runs if seq in run.seqs]
        assert [run.start for run in mine] == [0, *(run.stop for run in mine)][: len(mine)]
        for outer, inner in pairwise(mine):
            assert set(inner.seqs.tolist()) < set(outer.seqs.tolist())
        end = mine[-1].stop if mine else 0
        for column in range(end + min_pages - 1, num_pages[seq]):
            assert len(sharers(page_table, num_pages, seq, column)) < min_seqs


def as_sets(runs: tuple[SharedRun, ...]) -> set[tuple[int, int, tuple[int, ...]]]:
    return {(run.start, run.stop, tuple(sorted(run.seqs.tolist()))) for run in runs}


def as_rows(table, num_pages):
    """Each sequence's pages, as a lease gives them."""
    return [row[: max(1, count)].copy() for row, count in zip(table, num_pages, strict=True)]


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(0, 4))
def test_what_is_kept_of_a_step_is_what_would_be_found(seed, num_seqs, depth) -> None:
    """Sequences grow (by pages of their own, or of another), shrink, swap, go and are replaced."""
    rng = np.random.default_rng(seed)
    table, num_pages = random_forest(rng, num_seqs, depth, 4)
    table = np.pad(table, ((0, 0), (0, 12)))
    tables, fresh = PageTables(), 10_000
    rows = as_rows(table, num_pages)
    for _ in range(12):
        laid_out, runs = tables.lay_out(rows, num_pages.copy())
        assert as_sets(runs) == as_sets(find_runs(table, num_pages))
        assert laid_out.shape == (num_seqs, max(map(len, rows)))
        for row, ids in zip(laid_out, rows, strict=True):
            assert row[: len(ids)].tolist() == ids.tolist() and not row[len(ids) :].any()
        change = rng.integers(0, 9)
        seq, other = rng.integers(0, num_seqs, 2)
        if change < 5:  # as in decode, each at its own time
            for grows in np.flatnonzero(rng.random(num_seqs) < 0.3):
                if num_pages[grows] < table.shape[1]:
                    fresh += 1
                    is_copy = rng.random() < 0.2 and num_pages[other] > num_pages[grows]
                    page = table[other, num_pages[grows]] if is_copy else fresh
                    table[grows, num_pages[grows]] = page
                    num_pages[grows] += 1
        elif change == 5:
            num_pages[seq] = rng.integers(0, num_pages[seq] + 1)
        elif change == 6:
            table[[seq, other]], num_pages[[seq, other]] = (
                table[[other, seq]],
                num_pages[[other, seq]],
            )
        elif change == 7 and num_seqs > 1:
            table, num_pages = np.delete(table, seq, 0), np.delete(num_pages, seq)
            num_seqs, rows = num_seqs - 1, rows[:seq] + rows[seq + 1 :]
        elif num_pages[seq]:
            fresh += 1
            table[seq, rng.integers(0, num_pages[seq])] = fresh
        table[np.arange(table.shape[1]) >= num_pages[:, None]] = 0
        # A sequence whose pages are the same keeps its array, as in the scheduler (or not).
        rows = [
            old if old.tolist() == new.tolist() and rng.random() < 0.9 else new
            for old, new in zip(rows, as_rows(table, num_pages), strict=True)
        ]


def test_steps_that_only_grow_keep_their_runs() -> None:
    table, num_pages = random_forest(np.random.default_rng(3), 40, 3, 5)
    table = np.pad(table, ((0, 0), (0, 8)))
    for seq in range(40):  # a page of its own, that is not yet full
        table[seq, num_pages[seq]] = 1_000_000 + seq
    num_pages += 1
    tables, rows = PageTables(), as_rows(table, num_pages)
    _, runs = tables.lay_out(rows, num_pages.copy())
    assert runs
    for step in range(5):
        seq = np.arange(step, 40, 2)
        table[seq, num_pages[seq]] = 2_000_000 + 40 * step + seq
        num_pages[seq] += 1
        grown = as_rows(table, num_pages)
        rows = [grown[i] if i in seq else rows[i] for i in range(40)]
        laid_out, again = tables.lay_out(rows, num_pages.copy())
        assert again is runs
        same, again = tables.lay_out(list(rows), num_pages.copy())
        assert again is runs and same is laid_out


@pytest.mark.parametrize("num_prompts", [1, 16, 64, 256])
def test_a_step_of_256_sequences_costs_microseconds(num_prompts) -> None:
    page_table = np.zeros((256, 264), np.int32)
    prompt = np.arange(256) * num_prompts // 256
    page_table[:, :256] = 1 + np.arange(256) + 256 * prompt[:, None]
    page_table[:, 256:] = 100_000 + np.arange(256 * 8).reshape(256, 8)
    page_table = np.random.default_rng(0).permutation(page_table)
    taken = []
    for _ in range(20):
        begin = time.perf_counter()
        runs = find_runs(page_table, np.full(256, 260))
        taken.append(time.perf_counter() - begin)
    assert len(runs) == (0 if num_prompts == 256 else num_prompts)
    assert min(taken) < 1e-3  # 0.1 to 0.2 ms where nothing else runs


# ---------------------------------------------------------------- attention over shared pages


class Forest:
    """Sequences that fork from one another, in a poisoned cache of one layer.

    ``shape`` is a tree: (tokens, children, ...) of a node; its leaves are the sequences.
    Their leases are released, their pages stay as they are.
    """

    def __init__(self, shape, *, group: int = 2, query_len: int = 1, **config) -> None:
        torch.manual_seed(0)
        v_head_dim, num_kv_heads = config.pop("v_head_dim", None), 2
        # int4: two scale groups a row. Few sizes, as each is a kernel to compile.
        head_dim = config.pop("head_dim", 128 if config.get("dtype") == "int4" else 32)
        spec = KVSpec(
            num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim
        )
        self.codec = KVCodec(spec, KVConfig(**config))
        capacity = config.pop("capacity", "24MiB")
        self.cache = PrefixCache(spec, KVConfig(capacity=capacity, **config), device="cpu")
        self.leases: list[Lease] = []
        self.next_token = 1
        self._grow(None, shape)
        for lease in self.leases:
            self._write(lease, query_len)
        self.lengths = [lease.num_tokens for lease in self.leases]
        self.batch = attention_batch(self.cache.core, self.leases, [query_len] * len(self.leases))
        for lease in self.leases:
            lease.release()
        self.q = torch.randn(query_len * len(self.leases), num_kv_heads * group, head_dim)

    def _write(self, lease: Lease, num_tokens: int) -> None:
        lease.extend(range(self.next_token, self.next_token + num_tokens))
        self.next_token += num_tokens
        spec = self.cache.spec
        k = torch.randn(num_tokens, spec.num_kv_heads, spec.head_dim)
        lease.write(0, k, torch.randn(num_tokens, spec.num_kv_heads, spec.v_head_dim))

    def _grow(self, parent: Lease | None, node) -> None:
        num_tokens, *children = node
        if parent is None:
            first = self.next_token
            self.next_token += num_tokens
            lease = self.cache.acquire(range(first, first + num_tokens))
            spec = self.cache.spec
            k = torch.randn(num_tokens, spec.num_kv_heads, spec.head_dim)
            lease.write(0, k, torch.randn(num_tokens, spec.num_kv_heads, spec.v_head_dim))
        else:
            lease = parent.fork()
            if num_tokens:
                self._write(lease, num_tokens)
        for child in children:
            self._grow(lease, child)
        if children:
            lease.release()
        else:
            self.leases.append(lease)

    def attend(self, mode: str, backend: str = "cpu", **rule) -> tuple[torch.Tensor, KVReads]:
        rule = {"softmax_scale": self.cache.spec.head_dim**-0.5, **rule}
        batch = replace(self.batch, runs=()) if mode == "never" else self.batch
        config = replace(self.codec.config, shared_prefix=mode)
        codec = KVCodec(self.cache.spec, config)
        plan = get_backend(backend, torch.device("cpu"))(codec).plan(batch)
        return plan.attend(self.cache.layer(0), self.q, ScoreRule(**rule)), plan.reads


def leaves(count: int, tokens: int = 3):
    return [(tokens + i % 4,) for i in range(count)]


THREE_LEVELS = (1030, *[(530, *leaves(3)), (700, *leaves(2, 20)), (9, *leaves(2))])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("query_len", [1, 3, 40])
def test_shared_splits_change_no_bit(dtype, query_len) -> None:
    forest = Forest(THREE_LEVELS, dtype=dtype, query_len=query_len, page_size=16)
    before = launch.runs["shared"]
    alone, reads_alone = forest.attend("never")
    assert launch.runs["shared"] == before
    shared, reads = forest.attend("always")
    assert launch.runs["shared"] > before
    assert torch.equal(alone, shared)
    assert reads.tokens < reads_alone.tokens == reads.tokens_alone


@pytest.mark.parametrize(
    "rule",
    [
        {"sliding_window": 1},
        {"sliding_window": 700},
        {"sliding_window": 513},
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.01]), "sliding_window": 900},
    ],
    ids=lambda rule: "-".join(rule),
)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("query_len", [1, 20])
def test_shared_splits_change_no_bit_with_windows_caps_sinks_and_slopes(
    dtype, query_len, rule
) -> None:
    forest = Forest(THREE_LEVELS, dtype=dtype, query_len=query_len)
    alone, _ = forest.attend("never", **rule)
    shared, _ = forest.attend("always", **rule)
    assert torch.equal(alone, shared)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "group", "options"),
    [
        (33, 40, 3, {"dtype": "int8", "v_dtype": "int4", "rotate": "none"}),
    ],
)
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_shared_splits_change_no_bit_for_odd_sizes(
    head_dim, v_head_dim, group, options, page_size
) -> None:
    forest = Forest(
        (1100, *leaves(5)),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        group=group,
        page_size=page_size,
        **options,
    )
    alone, _ = forest.attend("never")
    shared, reads = forest.attend("always")
    assert torch.equal(alone, shared)
    assert reads.tokens == reads.tokens_alone - 4 * 2 * plan.SPLIT


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"sliding_window": 700},
        {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.01])},
    ],
    ids=lambda rule: "-".join(rule) or "plain",
)
@pytest.mark.parametrize("dtype", ["fp8", "model"])
def test_shared_splits_of_float_formats_equal_unshared_ones_to_float_rounding(dtype, rule) -> None:
    forest = Forest((1030, *[(530, *leaves(3)), (700, *leaves(70))]), dtype=dtype)
    before = launch.runs["shared"]
    alone, _ = forest.attend("never", **rule)
    assert launch.runs["shared"] == before
    shared, reads = forest.attend("always", **rule)
    assert launch.runs["shared"] > before
    assert torch.allclose(alone, shared, rtol=0, atol=2e-6)
    assert reads.tokens < 0.5 * reads.tokens_alone


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("rule", [{}, {"sliding_window": 600}], ids=["plain", "window"])
@pytest.mark.parametrize(
    ("context", "new", "page_size"), [(1, 1100, 16), (300, 700, 4), (512, 512, 64), (1000, 24, 1)]
)
def test_a_chunk_shares_the_splits_in_which_it_stands(dtype, rule, context, new, page_size) -> None:
    forest = Forest((context,), dtype=dtype, query_len=new, page_size=page_size)
    (length,) = forest.lengths
    # What lies behind the last token was never written.
    *_, k_scale, v_scale = forest.cache.layer(0)
    page_ids = forest.batch.page_table[0, : -(-length // page_size)].long()
    filled = torch.zeros(k_scale.shape[0] * page_size, dtype=torch.bool)
    slots = page_ids[:, None] * page_size + torch.arange(page_size)
    filled[slots.flatten()[:length]] = True
    for scale in (k_scale, v_scale):
        scale.transpose(1, 2)[~filled.view(-1, page_size)] = float("nan")
    alone, reads_alone = forest.attend("never", **rule)
    before = launch.runs["shared"]
    shared, reads = forest.attend("always", **rule)
    assert launch.runs["shared"] > before
    assert alone.isfinite().all()
    assert torch.equal(alone, shared)
    assert reads.tokens < reads_alone.tokens


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit_of_shared_splits(num_threads) -> None:
    forest = Forest((600, *leaves(40)))
    alone, _ = forest.attend("never")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        shared, _ = forest.attend("always")
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, shared)


def random_shape(rng: np.random.Generator, depth: int, num_leaves: int, longest: int):
    tokens = int(rng.integers(0, longest + 1))
    if depth == 0 or num_leaves == 1:
        return (tokens, *[(int(rng.integers(0, 9)),) for _ in range(num_leaves)])
    cuts = np.sort(rng.integers(0, num_leaves + 1, int(rng.integers(0, 4)))).tolist()
    sizes = np.diff([0, *cuts, num_leaves]).tolist()
    return (tokens, *[random_shape(rng, depth - 1, n, longest) for n in sizes if n])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 5),
    num_leaves=st.sampled_from([2, 5, 17, 64]),
    dtype=st.sampled_from(["int8", "int8", "int4", "fp8", "model"]),
    page_size=st.sampled_from([4, 16, 64]),
    longest=st.sampled_from([5, 300]),
    query_len=st.sampled_from([1, 1, 2, 18]),
    window=st.sampled_from([None, None, 7, 600]),
)
def test_random_forests_equal_float64_and_what_is_not_shared(
    backend, seed, depth, num_leaves, dtype, page_size, longest, query_len, window
) -> None:
    rng = np.random.default_rng(seed)
    tokens, *children = random_shape(rng, depth, num_leaves, longest)
    forest = Forest(
        (tokens + 1, *children), dtype=dtype, page_size=page_size, query_len=query_len, group=2
    )
    rule = {"sliding_window": window} if window else {}
    alone, reads_alone = forest.attend("never", backend, **rule)
    shared, reads = forest.attend("always", backend, **rule)
    if backend == "torch" or dtype in ("int8", "int4"):
        assert torch.equal(alone, shared)
    else:
        assert torch.allclose(alone, shared, rtol=0, atol=2e-6)
    assert reads.tokens <= reads.tokens_alone == reads_alone.tokens
    codec, batch = forest.codec, forest.batch
    rotation = hadamard(codec.spec.head_dim).double()
    score = ScoreRule(softmax_scale=codec.spec.head_dim**-0.5, **rule)
    k_pages, v_pages, k_scale, v_scale = forest.cache.layer(0)
    for i, (length, row) in enumerate(zip(forest.lengths, batch.page_table, strict=True)):
        page_ids = row[: -(-length // page_size)].long()
        k = reference.read_rows(codec.k_format, k_pages, k_scale, page_ids)[:, :length]
        v = reference.read_rows(codec.v_format, v_pages, v_scale, page_ids)[:, :length]
        q = forest.q[i * query_len : (i + 1) * query_len].double()
        q = q @ rotation if codec.rotate_k else q
        want = reference.attend_dense(q.transpose(0, 1), k.double(), v.double(), score)
        want = want.transpose(0, 1)
        want = want @ rotation if codec.rotate_v else want
        got = shared[i * query_len : (i + 1) * query_len].double()
        assert (got - want).abs().max() < 1e-3


@pytest.mark.parametrize("query_len", [1, 20])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_tiles_really_read_are_those_that_are_counted(query_len, mode) -> None:
    forest = Forest((1600, *leaves(6)), query_len=query_len)
    before = launch.tokens_read.total()
    _, reads = forest.attend(mode)
    assert launch.tokens_read.total() - before == forest.cache.spec.num_kv_heads * reads.tokens


def test_kv_bytes_grow_with_unique_pages_not_with_sequences() -> None:
    def reads(num_seqs: int) -> int:
        tails = [(32,) for _ in range(num_seqs)]
        forest = Forest((4096, *tails), capacity="8MiB")
        before = launch.tokens_read.total()
        _, counted = forest.attend("always")
        read = launch.tokens_read.total() - before
        assert read == counted.tokens * forest.cache.spec.num_kv_heads
        return read

    assert reads(64) <= 1.6 * reads(1)


def test_attend_batch_reads_shared_pages_once_by_itself() -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=32)
    outs = []
    for mode, expected in (("always", 1), ("never", 0)):
        torch.manual_seed(0)
        cache = PrefixCache(spec, KVConfig(capacity="2MiB", shared_prefix=mode), device="cpu")
        before = launch.runs["shared"]
        with cache.acquire(range(1, 1101)) as first:
            first.write(0, torch.randn(1100, 2, 32), torch.randn(1100, 2, 32))
            with first.fork() as second:
                for lease in (first, second):
                    lease.extend([5000])
                    lease.write(0, torch.randn(1, 2, 32), torch.randn(1, 2, 32))
                q = torch.randn(2, 4, 32)
                outs.append(cache.attend_batch(0, q, [first, second]))
        assert launch.runs["shared"] == before + expected
    assert torch.equal(*outs)


# ---------------------------------------------------------------- what sharing costs


@pytest.fixture
def no_costs(monkeypatch, tmp_path):
    monkeypatch.setenv("RADIXKV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(costs, "_known", {})


def count_measurements(key: str = "kernel") -> int:
    measured = []

    def measure() -> costs.SharingCost:
        measured.append(key)
        return costs.SharingCost.fit((2, -1e-6), (10, 3e-6), 1e-4)

    costs._known.clear()
    cost = costs.sharing_cost(key, measure)
    assert cost.gain_s(2) == pytest.approx(-1e-6)
    assert cost.gain_s(10) == pytest.approx(3e-6)
    return len(measured)


def test_costs_are_measured_once_and_kept_on_disk(no_costs) -> None:
    assert [count_measurements() for _ in range(3)] == [1, 0, 0]
    assert count_measurements("another") == 1
    assert count_measurements() == 0
    for i in range(costs.MAX_ENTRIES + 3):
        count_measurements(f"kernel {i}")
    entries = json.loads(costs.path().read_text())["entries"]
    assert len(entries) == costs.MAX_ENTRIES
    assert [path.name for path in costs.path().parent.iterdir()] == [costs.FILE_NAME]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"version": 0, "entries": {}}',
        b'{"version": 1, "entries": []}',
        b'{"version": 1, "entries": {"kernel": {"saved_s": 1.0}}}',
        b'{"version": 1, "entries": {"kernel": {"saved_s": "1", "fixed_s": 1.0, "step_s": 1.0}}}',
        b'{"version": 1, "entries": {"kernel": {"saved_s": NaN, "fixed_s": 1.0, "step_s": 1.0}}}',
    ],
)
def test_a_damaged_file_of_costs_is_measured_anew(no_costs, content) -> None:
    costs.path().write_bytes(content)
    assert [count_measurements() for _ in range(2)] == [1, 0]


def test_without_a_place_to_keep_them_costs_are_measured_for_the_process(
    no_costs, monkeypatch, tmp_path, caplog
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RADIXKV_CACHE_DIR", str(tmp_path / "file"))
    assert count_measurements() == 1
    assert "measured for this process only" in caplog.text


def test_costs_are_of_one_build_of_all_kernels(monkeypatch) -> None:
    codec = KVCodec(KVSpec(num_layers=1, num_kv_heads=2, head_dim=32), KVConfig())
    before = cpu_backend._cost_key(codec, 2)
    assert cpu_backend._cost_key(codec, 2) == before
    monkeypatch.setattr(cpu_backend.compile_cache, "build", lambda: "another")
    assert cpu_backend._cost_key(codec, 2) != before


@pytest.mark.parametrize(("saved_s", "expected"), [(1.0, 1), (-1.0, 0)])
def test_runs_are_shared_where_it_pays(no_costs, monkeypatch, saved_s, expected) -> None:
    cost = costs.SharingCost(saved_s, 0.0, 0.0)
    monkeypatch.setattr(costs, "sharing_cost", lambda key, measure: cost)
    forest = Forest((600, *leaves(3)))
    before = launch.runs["shared"]
    forest.attend("auto")
    assert launch.runs["shared"] == before + expected


def test_the_measurement_finds_a_gain_for_many_queries(no_costs) -> None:
    forest = Forest((600, *leaves(2)))
    forest.attend("auto")
    (entry,) = json.loads(costs.path().read_text())["entries"].values()
    assert set(entry) == {"saved_s", "fixed_s", "step_s"}
    assert entry["step_s"] > 0


# ---------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def long_model():
    """A tiny Llama with room for several splits."""
    import transformers as tf

    config = tf.LlamaConfig(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(config).eval()


def test_an_engine_gives_the_same_tokens_and_scores_with_shared_runs(long_model) -> None:
    prompt = [(7 + 13 * i) % 500 for i in range(1100)]
    continuations = [[5 + i, 6, 7 + i] for i in range(5)]
    answers = []
    for mode in ("never", "always"):
        kv = KVConfig(capacity="4MiB", shared_prefix=mode)
        with Engine(long_model, kv=kv, backend="cpu") as engine:
            result = engine.generate(prompt, n=4, max_new_tokens=6, temperature=1.0, seed=3)
            before = engine.stats()
            scores = engine.score(prompt, continuations)
            stats = engine.stats()
            answers.append(
                ([s.token_ids for s in result.samples], [s.token_logprobs for s in scores])
            )
            read = stats.kv_bytes_read - before.kv_bytes_read
            alone = stats.kv_bytes_alone - before.kv_bytes_alone
            assert stats.kv_bytes_alone > 0
            if mode == "never":
                assert stats.kv_bytes_read == stats.kv_bytes_alone
            else:
                assert stats.kv_bytes_read < stats.kv_bytes_alone
                assert read < 0.5 * alone, "continuations of one prompt read it once"
    assert answers[0] == answers[1]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_what_plans_of_one_batch_read_is_each_ones_own(backend) -> None:
    forest = Forest(THREE_LEVELS)
    plans = []
    for mode in ("always", "never"):
        config = replace(forest.codec.config, shared_prefix=mode)
        codec = KVCodec(forest.cache.spec, config)
        batch = forest.batch if mode == "always" else replace(forest.batch, runs=())
        plans.append(get_backend(backend, torch.device("cpu"))(codec).plan(batch))
    rule = ScoreRule(softmax_scale=1.0)
    for made in plans:
        made.attend(forest.cache.layer(0), forest.q, rule)
    together, alone = (made.reads for made in plans)
    assert together.tokens < together.tokens_alone == alone.tokens == alone.tokens_alone


def test_runs_with_a_gap_are_refused() -> None:
    parent, child = (np.arange(2), 0, 1), (np.array([1]), 1, 2)
    sizes = [1100, 1100], [0, 3, 6], 2
    plan.make_plan(*sizes, in_rows=True, shared=[parent, child])
    with pytest.raises(ValueError, match="without a gap"):
        plan.make_plan(*sizes, in_rows=True, shared=[child])


def test_a_run_is_shared_only_if_what_lies_before_it_is() -> None:
    # Noise may measure that more queries save less: the parent does not pay, its child does.
    forest = Forest(THREE_LEVELS, query_len=3)
    cost = costs.SharingCost(saved_s=-1.0, fixed_s=-4.0, step_s=0.0)
    shared = cpu_backend._shared_splits(forest.batch, 16, True)
    assert any(start > 0 for _, start, _ in shared)
    kept = cpu_backend._worthwhile(shared, forest.batch, cost, 2)
    ends = np.zeros(len(forest.lengths), int)
    for seqs, start, stop in kept:
        assert (ends[seqs] == start).all()
        ends[seqs] = stop


def test_pages_that_fill_are_shared_though_no_sequence_got_one() -> None:
    tables, rows = PageTables(), [np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32)]
    for count in (0, 1, 2, 1):
        table, runs = tables.lay_out(rows, np.array([count, count]))
        assert as_sets(runs) == as_sets(find_runs(table, [count, count]))
