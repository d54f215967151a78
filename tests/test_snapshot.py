"""Snapshots: what was saved is found again, in every bit; anything else is refused whole."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.snapshot import mutants
from radixkv import KVConfig, KVSpec, PrefixCache, SnapshotError
from radixkv.cache.snapshot import Snapshot, merge, replacing, tree_namespaces
from radixkv.cache.tree import encode_tokens
from radixkv.cli import main as cli
from radixkv.config import KV_DTYPES

ROOT = Path(__file__).resolve().parent.parent
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, v_head_dim=2)


def make(
    page_size: int = 4,
    num_pages: int = 64,
    dtype: str = "int8",
    spec: KVSpec = SPEC,
    **options: Any,
) -> PrefixCache:
    probe = PrefixCache(spec, KVConfig(dtype=dtype, page_size=page_size, capacity="1MiB"))
    capacity = probe.codec.bytes_per_page * num_pages
    config = KVConfig(dtype=dtype, page_size=page_size, capacity=capacity, **options)
    return PrefixCache(spec, config, backend="torch")


def put(cache: PrefixCache, token_ids: list[int], *, namespace: Any = None, **options: Any) -> None:
    """K and V of a token depend on all tokens before it, and on the namespace."""
    with cache.acquire(token_ids, namespace=namespace) as lease:
        start = lease.num_cached
        ids = np.array(token_ids, dtype=np.int64)
        mark = np.cumsum(ids * 31 + 7) % 1009 + len(repr(namespace))
        rows = torch.tensor(np.stack([mark, mark % 97, ids % 89, ids + 1], 1), dtype=torch.float32)
        k = rows[start:, None].repeat(1, cache.spec.num_kv_heads, 1)
        for layer in range(cache.spec.num_layers):
            lease.write(layer, k + layer, (k + layer)[..., : cache.spec.v_head_dim])
        lease.commit(**options)


def stored(cache: PrefixCache, token_ids: list[int], namespace: Any = None) -> tuple[int, bytes]:
    """How many tokens are found, and the stored bytes of these, in all layers."""
    found = cache.tree.match(encode_tokens(token_ids), namespace)
    pages = found.page_ids
    index, at = np.divmod(np.arange(found.num_tokens), cache.page_size)
    parts = [
        tensor.view(torch.uint8)[pages[index], :, at].numpy().tobytes()
        for layer in range(cache.spec.num_layers)
        for tensor in cache.layer(layer)
        if tensor.numel()
    ]
    count = found.num_tokens
    return count, b"".join(parts)


def state(cache: PrefixCache) -> Any:
    """Everything that a failed call must leave as it was."""
    stats = cache.stats()
    return cache.render(), stats.pages_free, stats.pages_cached, cache.pool.ref_count.tobytes()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda number: None)  # 100 ms each on a slow disk


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12)


@settings(max_examples=40)
@given(
    sequences=sequences,
    page_size=st.sampled_from([1, 2, 4, 16]),
    dtype=st.sampled_from(KV_DTYPES),
    eviction=st.sampled_from(["lru", "lfu", "priority"]),
)
def test_what_was_saved_is_found_again_bit_for_bit(
    tmp_path_factory: Any, sequences: list[list[int]], page_size: int, dtype: str, eviction: str
) -> None:
    path = tmp_path_factory.mktemp("snapshot") / "cache.rkv"
    cache, other = (make(page_size, 256, dtype, eviction=eviction) for _ in range(2))
    names = itertools.cycle([None, "tenant", 7, ("a", b"b", (1, None))])
    named = list(zip(sequences, names))
    for token_ids, namespace in named:
        put(cache, token_ids, namespace=namespace)
    cache.save(path)
    loaded = other.load(path)
    other.check()
    assert loaded.tokens == cache.tree.num_tokens == other.tree.num_tokens
    assert loaded.left_out_pages == loaded.damaged_pages == 0
    for (token_ids, _), namespace in itertools.product(named, [None, "tenant", 7, "nobody"]):
        asked = [*token_ids, 0, 1]
        assert stored(other, asked, namespace) == stored(cache, asked, namespace)
    other.check()
    assert other.stats().pages_free + other.stats().pages_cached == other.stats().pages_total


@settings(max_examples=40)
@given(sequences=sequences, room=st.integers(1, 20), eviction=st.sampled_from(["lru", "priority"]))
def test_what_fits_is_what_was_used_last_and_is_evicted_in_the_same_order(
    tmp_path_factory: Any, sequences: list[list[int]], room: int, eviction: str
) -> None:
    path = tmp_path_factory.mktemp("snapshot") / "cache.rkv"
    cache, small = make(2, 256, eviction="lru"), make(2, room, eviction="lru")
    if eviction == "priority":
        cache, small = make(2, 256, eviction=eviction), make(2, 256, eviction=eviction)
    for number, token_ids in enumerate(sequences):
        options = {"priority": number % 3} if eviction == "priority" else {}
        put(cache, token_ids, **options)
    cache.save(path)
    small.load(path)
    small.check()
    # Evicting from the original until as much is left gives what fits, to the page.
    excess = cache.stats().pages_cached - small.pool.num_pages
    if excess > 0:
        cache.tree.evict(excess)
    while True:
        for token_ids in sequences:
            assert small.match(token_ids) == cache.match(token_ids)
        if not cache.tree.evict(1):
            break
        assert small.tree.evict(1) == 1
    assert small.stats().pages_free == small.pool.num_pages


@settings(max_examples=40)
@given(first=sequences, second=sequences, room=st.integers(1, 60))
def test_a_load_adds_to_what_is_there_and_takes_nothing_away(
    tmp_path_factory: Any, first: list[list[int]], second: list[list[int]], room: int
) -> None:
    path = tmp_path_factory.mktemp("snapshot") / "cache.rkv"
    cache, other = make(2, 256), make(2, room)
    for token_ids in first:
        put(cache, token_ids)
    for token_ids in second:
        if -(-len(token_ids) // 2) <= room:
            put(other, token_ids)
    cache.save(path)
    before = {tuple(token_ids): other.match(token_ids) for token_ids in second + first}
    loaded = other.load(path)
    other.check()
    for token_ids, found in before.items():
        now = other.match(list(token_ids))
        assert now >= found
        if not loaded.left_out_pages:
            assert now == max(found, cache.match(list(token_ids)))
    oracle = make(2, 256)
    for token_ids in first + second:
        put(oracle, token_ids)
    for token_ids in first + second:
        count, found_bytes = stored(other, token_ids)
        assert (count, found_bytes) == stored(oracle, token_ids[:count])


def filled(num_pages: int = 64, **options: Any) -> PrefixCache:
    """Three branches below a shared beginning, one of them with a part-filled page."""
    cache = make(4, num_pages, **options)
    for token_ids in TREE:
        put(cache, token_ids)
    return cache


TREE = [
    [*range(10), 50, 51, 52, 53, 54, 55],
    [*range(10), 60, 61],
    [*range(10), 50, 51, 70],
    [5, 6, 7],
]


def same(cache: PrefixCache, other: PrefixCache, namespace: Any = None) -> None:
    for token_ids in TREE:
        assert stored(cache, token_ids, namespace) == stored(other, token_ids, namespace)


# --- what is refused, and what stays ---------------------------------------------------------


def refused(cache: PrefixCache, path: Path, error: type[Exception] = SnapshotError) -> str:
    """The message of a refused load; the cache is as it was."""
    before = state(cache)
    with pytest.raises(error) as caught:
        cache.load(path)
    cache.check()
    assert state(cache) == before
    return str(caught.value)


def test_another_geometry_format_or_model_is_named(tmp_path: Path) -> None:
    """PER-1, for a cache by itself: everything that two caches can differ in."""
    path = tmp_path / "cache.rkv"
    filled().save(path)
    for options, name in (
        ({"page_size": 8}, "page_size: expected 8, got 4"),
        ({"dtype": "fp8"}, "k_format"),
        ({"dtype": "int4"}, "k_format"),
        ({"dtype": "model"}, "k_format"),
        ({"v_dtype": "fp8"}, "v_format"),
        ({"rotate": "none"}, "not rotated"),
        ({"spec": KVSpec(num_layers=3, num_kv_heads=2, head_dim=4, v_head_dim=2)}, "num_layers"),
        ({"spec": KVSpec(num_layers=2, num_kv_heads=1, head_dim=4, v_head_dim=2)}, "num_kv_heads"),
        ({"spec": KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, v_head_dim=2)}, "head_dim"),
        ({"spec": KVSpec(num_layers=2, num_kv_heads=2, head_dim=4)}, "v_head_dim"),
        (
            {"spec": KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, v_head_dim=2,
                            dtype=torch.float16)},
            "model_dtype: expected 'float16', got 'float32'",
        ),
    ):  # fmt: skip
        assert name in refused(make(**{"page_size": 4, **options}), path)  # type: ignore[arg-type]
    for mine, theirs in (({}, {"weights": "a"}), ({"weights": "a"}, {}), ({"w": "a"}, {"w": "b"})):
        cache, other = filled(), filled()
        cache.identify, other.identify = (lambda m=mine: m), (lambda t=theirs: t)
        cache.save(path)
        assert f"{next(iter({**mine, **theirs}))}: expected" in refused(other, path)


def test_a_format_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.rkv"
    filled(dtype="int4").save(path)
    monkeypatch.setattr("radixkv.attention.formats.Int4Format.version", 99)
    assert "version 99" in refused(make(dtype="int4"), path)
    monkeypatch.setattr("radixkv.cache.snapshot_file.FORMAT_VERSION", 2)
    assert "expected format version 2, got 1" in refused(make(dtype="int4"), path)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    cache = filled()
    path = tmp_path / "cache.rkv"
    assert str(path) in refused(cache, path, FileNotFoundError)
    for content in (b"", b"x", b"\x89RKV\r\n\x1a\n", b"PK" * 100, b"\0" * 5000):
        path.write_bytes(content)
        assert str(path) in refused(cache, path)
    refused(cache, tmp_path, IsADirectoryError)


def test_a_byte_changed_anywhere_is_found_or_means_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cache.rkv"
    cache = filled()
    cache.save(path)
    whole = path.read_bytes()
    with Snapshot(path) as file:
        used = file._start
    random_ = random.Random(0)
    places = [*range(0, 300, 2), *random_.sample(range(used, len(whole)), 150)]
    for at in places:
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ 1 << random_.randrange(8)]) + whole[at + 1 :]
        )
        other = make(4)
        try:
            other.load(path)
        except SnapshotError:
            assert other.tree.num_nodes == 0
        else:
            same(cache, other)
        other.check()


def test_pages_that_change_places_are_found(tmp_path: Path) -> None:
    path = tmp_path / "cache.rkv"
    filled().save(path)
    whole = path.read_bytes()
    with Snapshot(path) as file:
        start, stride = file._start, file._stride
    first, second = whole[start : start + stride], whole[start + stride : start + 2 * stride]
    path.write_bytes(whole[:start] + second + first + whole[start + 2 * stride :])
    assert "page 0 has another checksum" in refused(make(4), path)


# --- salvage ---------------------------------------------------------------------------------


def test_salvage_keeps_what_is_whole_from_the_beginning(tmp_path: Path) -> None:
    """For every page damaged alone, and every length of the file: an oracle by matches."""
    path = tmp_path / "cache.rkv"
    cache = filled()
    cache.save(path)
    whole = path.read_bytes()
    with Snapshot(path) as file:
        start, stride, count = file._start, file._stride, file.num_pages
    variants = []
    for page in range(count):
        at = start + page * stride + 3
        variants.append((whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :], {page}))
        variants.append((whole[: start + page * stride + 5], set(range(page, count))))
    for content, lost in variants:
        path.write_bytes(content)
        other = make(4)
        assert "damaged" in refused(other, path)
        loaded = other.load(path, salvage=True)
        other.check()
        assert loaded.damaged_pages >= len(lost)
        assert loaded.pages == count - loaded.damaged_pages
        for token_ids in TREE:
            found, content_ = stored(other, token_ids)
            assert content_ == stored(cache, token_ids[:found])[1]
        assert loaded.tokens == other.tree.num_tokens
    path.write_bytes(whole[: start - 4000])
    with pytest.raises(SnapshotError, match="cut short"):
        make(4).load(path, salvage=True)
    path.write_bytes(whole + b"more")
    assert make(4).load(path, salvage=True).pages == count


# --- what is saved ---------------------------------------------------------------------------


def test_prefixes_save_their_sub_trees_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache.rkv"
    cache = filled()
    for prefixes, kept in (
        ([[5, 6]], [0, 0, 0, 3]),
        ([[*range(10), 50]], [16, 10, 13, 0]),
        ([[*range(10), 50, 51, 70, 9]], [12, 10, 13, 0]),
        ([[*range(9)]], [16, 12, 13, 0]),
        ([[0, 1, 2, 3, 4, 9]], [5, 5, 5, 0]),
        ([[*range(10), 60], [5]], [10, 12, 10, 3]),
        ([[8]], [0, 0, 0, 0]),
        ([], [0, 0, 0, 0]),
    ):
        cache.save(path, prefixes=prefixes)
        other = make(4)
        other.load(path)
        other.check()
        assert [other.match(token_ids) for token_ids in TREE] == kept, prefixes
        for token_ids, count in zip(TREE, kept):
            assert stored(other, token_ids) == stored(cache, token_ids[:count])
    with pytest.raises(ValueError, match="at least one token"):
        cache.save(path, prefixes=[[]])


def test_namespaces_that_mean_the_same_elsewhere_are_kept_others_named(tmp_path: Path) -> None:
    path = tmp_path / "cache.rkv"
    good = [None, "tenant", b"x", 0, -(2**63), 2**64 - 1, ("a", (1, None, b""))]
    cache = make(4)
    for namespace in good:
        put(cache, [1, 2, 3], namespace=namespace)
    cache.save(path)
    other = make(4)
    other.load(path)
    assert set(other.tree.roots) == set(cache.tree.roots)
    for namespace in good:
        assert stored(other, [1, 2, 3], namespace) == stored(cache, [1, 2, 3], namespace)
        cache.save(path, namespace=namespace)
        alone = make(4)
        alone.load(path)
        assert tree_namespaces(alone.tree) == [namespace]
    before = path.read_bytes()
    nested: Any = ()
    for _ in range(20):
        nested = (nested,)
    for bad in (1.5, frozenset([1]), object(), ("a", 1.5), 2**64, "\ud800", "x" * 5000, nested):
        worse = make(4)
        put(worse, [1], namespace=bad)
        with pytest.raises(SnapshotError, match="namespace: expected None, a str"):
            worse.save(path)
        worse.save(path, namespace="not there")
        with Snapshot(path) as file:
            assert file.num_pages == 0
        path.write_bytes(before)
    assert list(tmp_path.iterdir()) == [path]


def test_rows_that_no_token_of_the_tree_owns_are_not_in_the_file(tmp_path: Path) -> None:
    """A part-filled page may hold rows of a request that goes on, or of one long gone."""
    path = tmp_path / "cache.rkv"
    cache = make(4, dtype="model")
    with cache.acquire([1, 2, 3, 4, 5, 6, 7, 8]) as lease:
        for layer in range(2):
            rows = torch.full((8, 2, 4), 1234.5)
            lease.write(layer, rows, rows[..., :2])
        lease.commit(5)
    cache.save(path)
    needle = np.float32(1234.5).tobytes()
    assert path.read_bytes().count(needle) == 5 * 2 * 2 * (4 + 2)


def test_size_is_that_of_the_pages(tmp_path: Path) -> None:
    path = tmp_path / "cache.rkv"
    spec = KVSpec(num_layers=30, num_kv_heads=3, head_dim=64)  # of SmolLM2-135M
    cache = make(16, 200, spec=spec)
    for start in range(10):
        with cache.acquire([0] * 160 + [start] * 150) as lease:
            lease.commit(310)
    cache.save(path)
    pages = cache.stats().pages_cached
    assert pages > 100
    assert path.stat().st_size <= 1.02 * pages * cache.codec.bytes_per_page


@pytest.mark.parametrize("eviction", ["lfu", "priority"])
def test_counts_priorities_and_times_to_live_are_kept(tmp_path: Path, eviction: str) -> None:
    path = tmp_path / "cache.rkv"
    cache, other = make(4, eviction=eviction), make(4, eviction=eviction)
    cache.core.now, other.core.now = (lambda: 1000.0), (lambda: 5.0)
    for number in range(6):
        options: dict[str, Any] = {}
        if eviction == "priority":
            options = {"priority": 5 - number, "ttl": (None, 3.0)[number == 0]}
        for _ in range(6 - number):
            put(cache, [100 + number] * 8, **options)
    cache.save(path)
    other.load(path)
    for now, clock in ((1000.0, 5.0), (1004.0, 9.0)):
        cache.core.now, other.core.now = (lambda n=now: n), (lambda c=clock: c)
        cache.save(path)
        assert cache.evict(8) == other.evict(8) == 8
        found = [cache.match([100 + number] * 8) for number in range(6)]
        assert found == [other.match([100 + number] * 8) for number in range(6)]
    assert found == ([8, 8, 8, 8, 0, 0] if eviction == "lfu" else [0, 8, 8, 8, 8, 0])


def test_a_tree_of_1100_levels(tmp_path: Path) -> None:
    """POOL-6: no recursion anywhere."""
    path = tmp_path / "cache.rkv"
    cache, other = make(1, 2201), make(1, 2201)
    with cache.acquire([0]) as lease:
        for level in range(1, 1100):
            lease.extend([level])
            lease.commit(level + 1)
            with lease.fork() as twig:
                twig.extend([5000])
                twig.commit(level + 2)
    cache.save(path)
    other.load(path)
    other.check()
    assert other.tree.num_tokens == cache.tree.num_tokens == 2199
    assert other.match([*range(1100), 5000]) == 1101
    assert other.match([*range(500), 5000]) == 501


def test_an_empty_cache_is_a_snapshot_too(tmp_path: Path) -> None:
    path = tmp_path / "cache.rkv"
    make(4).save(path)
    cache = filled()
    before = state(cache)
    assert cache.load(path).tokens == 0
    assert state(cache) == before


# --- the disk, other threads and processes ---------------------------------------------------


def test_a_disk_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.rkv"
    cache = filled()
    cache.save(path)
    whole = path.read_bytes()

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    before = state(cache)
    with pytest.raises(OSError, match="No space"):
        cache.save(path)
    monkeypatch.setattr("radixkv.cache.snapshot.write", lambda *_: full(0))
    with pytest.raises(OSError, match="No space"):
        cache.save(path)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]
    assert state(cache) == before
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "no" / "folder")


def test_a_leftover_of_a_killed_writer_is_removed_one_that_is_written_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cache.rkv"
    dead = tmp_path / ".cache.rkv.abc.saving"
    dead.write_bytes(b"half")
    with replacing(path) as file:
        assert not dead.exists()
        file.write(b"first")
        with replacing(path) as other:
            other.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    link = tmp_path / "link"
    link.symlink_to(path)
    with replacing(link) as file:
        file.write(b"third")
    assert link.is_symlink() and path.read_bytes() == b"third"


def test_saves_and_loads_of_several_threads_beside_a_running_cache(tmp_path: Path) -> None:
    path = tmp_path / "cache.rkv"
    cache = filled(256)
    expected = [stored(cache, token_ids) for token_ids in TREE]
    pins = [cache.pin(token_ids) for token_ids in TREE]
    cache.save(path)
    errors: list[Exception] = []
    stop = threading.Event()

    def run(work: Any) -> None:
        try:
            while not stop.is_set():
                work()
        except Exception as error:
            errors.append(error)
            stop.set()

    def load() -> None:
        other = make(4, 256)
        other.load(path)
        other.check()
        assert [stored(other, token_ids) for token_ids in TREE] == expected

    counter = itertools.count(1000)
    works = [load, load, lambda: cache.save(path), lambda: put(cache, [7, next(counter)])]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    stop.wait(3.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    for pin in pins:
        pin.unpin()
    cache.check()


LOADER = """
import hashlib, sys, time
from test_snapshot import TREE, make, stored
print("ready", flush=True)
sys.stdin.readline()  # the two begin together
seen = set()
end = time.monotonic() + 1
while time.monotonic() < end:
    cache = make(4, 256)
    cache.load(sys.argv[1])
    cache.check()
    found = repr([stored(cache, token_ids) for token_ids in TREE])
    seen.add(hashlib.sha256(found.encode()).hexdigest())
print(*seen)
"""


def test_two_processes_load_one_file_at_once_while_it_is_saved_again(tmp_path: Path) -> None:
    path = tmp_path / "cache.rkv"
    cache = filled(256)
    cache.save(path)
    found = repr([stored(cache, token_ids) for token_ids in TREE])
    loaders = [
        subprocess.Popen(
            [sys.executable, "-c", LOADER, str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for loader in loaders:
        assert loader.stdout is not None
        assert loader.stdout.readline() == "ready\n"
    for loader in loaders:
        assert loader.stdin is not None
        loader.stdin.write("\n")
        loader.stdin.flush()
    while any(loader.poll() is None for loader in loaders):
        cache.save(path)
    for loader in loaders:
        out, _ = loader.communicate()
        assert loader.returncode == 0
        assert out.split() == [hashlib.sha256(found.encode()).hexdigest()]


MEMORY = """
import sys, torch, numpy as np
from pathlib import Path
from radixkv import KVConfig, KVSpec, PrefixCache
torch.set_num_threads(1)
path = Path(sys.argv[1])
spec = KVSpec(num_layers=8, num_kv_heads=4, head_dim=64)
def make():
    cache = PrefixCache(spec, KVConfig(capacity="160MiB"), backend="torch")
    for tensor in cache.storage.pages:
        tensor.view(torch.uint8).zero_()  # the pool itself is not what is counted
    return cache
def peak_growth(work):
    Path("/proc/self/clear_refs").write_text("5")  # begin a new peak
    def field(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
    before = field("VmRSS")
    work()
    return field("VmHWM") - before
cache = make()
num_tokens = cache.pool.num_pages // 64 * cache.page_size
for start in range(64):
    ids = np.arange(num_tokens) + 1_000_000 * start
    with cache.acquire(ids) as lease:
        lease.commit(len(ids))
def save(): cache.save(path)
saved = peak_growth(save)
del cache
other = make()
loaded = peak_growth(lambda: other.load(path))
assert other.tree.num_tokens == 64 * num_tokens
print(path.stat().st_size, saved, loaded)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_beyond_the_pool_is_flat(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "cache.rkv")],
        env={**os.environ, "RADIXKV_POISON": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size, saved, loaded = map(int, done.stdout.split())
    assert size > 155 * 2**20
    assert max(saved, loaded) < 64 * 2**20


# --- the command line ------------------------------------------------------------------------


def test_the_command_says_what_is_in_a_file_and_finds_damage(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "cache.rkv"
    filled().save(path)
    assert cli.main(["snapshot", "info", str(path), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["tokens"], report["page_size"], report["bytes"]) == (
        filled().tree.num_tokens, 4, path.stat().st_size,
    )  # fmt: skip
    assert cli.main(["snapshot", "verify", str(path)]) == 0
    assert "damaged_pages   0" in capsys.readouterr().out
    content = bytearray(path.read_bytes())
    content[-60] ^= 1
    path.write_bytes(content)
    assert cli.main(["snapshot", "verify", str(path)]) == cli.EXIT_BAD_INPUT
    assert "has damaged pages" in capsys.readouterr().err
    for arguments in (["info", str(tmp_path / "no")], ["merge", str(path), str(path)]):
        assert cli.main(["snapshot", *arguments]) == cli.EXIT_BAD_INPUT
        assert "error: FILE: expected" in capsys.readouterr().err


@settings(max_examples=25)
@given(first=sequences, second=sequences)
def test_a_merged_file_holds_what_both_hold_and_nothing_twice(
    tmp_path_factory: Any, first: list[list[int]], second: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("snapshot")
    paths = [folder / name for name in ("merged", "first", "second")]
    oracle = make(2, 256)
    for path, token_lists in zip(paths[1:], (first, second)):
        cache = make(2, 256)
        for token_ids in token_lists:
            put(cache, token_ids, namespace="n")
            put(oracle, token_ids, namespace="n")
        cache.save(path)
    assert cli.main(["snapshot", "merge", *map(str, paths), "--json"]) == 0
    other = make(2, 256)
    loaded = other.load(paths[0])
    other.check()
    assert loaded.tokens == oracle.tree.num_tokens
    assert loaded.pages == oracle.stats().pages_cached
    for token_ids in first + second:
        assert stored(other, token_ids, "n") == stored(oracle, token_ids, "n")


def test_files_that_do_not_belong_together_are_not_merged(tmp_path: Path) -> None:
    one, two, out = (tmp_path / name for name in ("one", "two", "out"))
    filled().save(one)
    filled(dtype="fp8").save(two)
    with pytest.raises(SnapshotError, match="k_format"):
        merge(out, [one, two])
    content = bytearray(one.read_bytes())
    content[-60] ^= 1
    two.write_bytes(content)
    with pytest.raises(SnapshotError, match="another checksum"):
        merge(out, [two, one])
    assert not out.exists()
    two.unlink()
    assert list(tmp_path.iterdir()) == [one]


# --- a short part of fuzz/snapshot.py ---------------------------------------------------------


@pytest.mark.parametrize("truncate", [False, True])
def test_bytes_of_any_kind_are_refused_or_loaded_right(truncate: bool) -> None:
    totals = mutants(400 if truncate else 2000, seed=1, truncate=truncate)
    assert totals["refused"] > 0.3 * totals["files"]
    assert totals["loaded"] > 0.02 * totals["files"]
    assert totals["peak_growth_bytes"] < 64 * 2**20


def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.snapshot", "--kills", "10", "--mutants", "0",
         "--truncations", "0"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'kills': 10" in done.stdout
