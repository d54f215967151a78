"""Fuzz the snapshot parser, cut files short, and kill writers: `python -m fuzz.snapshot`.

A mutant either keeps the file's checksums, which then must find what was changed, or has them
made anew ("forged"), so that what lies behind them is reached. Whatever the bytes: a
`SnapshotError` and the cache as it was, or a cache that passes `check()`; and where nothing
was forged, every hit has the very bytes that were saved.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch

from radixkv import KVConfig, KVSpec, PrefixCache, SnapshotError
from radixkv.cache import snapshot_file as format_
from radixkv.cache.tree import Tokens

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=2)
NUM_PAGES = 48
MEMORY_BYTES = 1 << 30  # that a forged file may make the process ask for beyond what it has
SETTINGS = (
    KVConfig(dtype="int8", page_size=4),
    KVConfig(dtype="model", page_size=2, eviction="priority"),
    KVConfig(dtype="fp8", page_size=1, eviction="lfu"),
    KVConfig(dtype="int4", page_size=16),
)
WARM: tuple[Hashable, list[int]] = (None, [0, 1, 2, 0, 1])  # cached before some loads


def _cache(config: KVConfig) -> PrefixCache:
    page_bytes = format_.KVCodec(SPEC, config).bytes_per_page
    fields = {**config.__dict__, "capacity": NUM_PAGES * page_bytes}
    return PrefixCache(SPEC, KVConfig(**fields), backend="torch")


def put(cache: PrefixCache, namespace: Hashable, token_ids: list[int], number: int = 0) -> None:
    """Compute and commit a sequence; K and V tell the namespace and all tokens before."""
    with cache.acquire(token_ids, namespace=namespace) as lease:
        mark = np.cumsum(np.array(token_ids) * 31 + 7) % 1009 + len(repr(namespace))
        rows = torch.from_numpy(np.stack([mark, mark % 97], 1)).float()[lease.num_cached :, None]
        for layer in range(SPEC.num_layers):
            lease.write(layer, rows + layer, rows - layer)
        options = {"priority": number % 3, "ttl": 60.0} if number % 2 else {}
        lease.commit(**options)  # type: ignore[arg-type]


def stored(cache: PrefixCache, namespace: Hashable, tokens: Tokens) -> tuple[int, bytes]:
    """How many tokens are found, and the stored bytes of these, in all layers."""
    found = cache.tree.match(tokens, namespace)
    index, at = np.divmod(np.arange(found.num_tokens), cache.page_size)
    parts = [
        tensor.view(torch.uint8)[layer, found.page_ids[index], :, at].numpy().tobytes()
        for tensor in cache.storage.pages
        if tensor.numel()
        for layer in range(SPEC.num_layers)
    ]
    return found.num_tokens, b"".join(parts)


def leaves(cache: PrefixCache) -> Iterator[tuple[Hashable, Tokens]]:
    """Every whole sequence that a cache holds."""
    tree = cache.tree
    for root in tree.roots.values():
        stack = [(node, [node.tokens]) for node in tree.children(root)]
        while stack:
            node, parts = stack.pop()
            below = tree.children(node)
            stack += [(child, [*parts, child.tokens]) for child in below]
            if not below:
                yield root.namespace, np.concatenate(parts)


@dataclass
class Target:
    """One configuration, its snapshot, and a cache to load mutants into."""

    config: KVConfig
    seed: int
    original: PrefixCache = field(init=False)
    merged: PrefixCache = field(init=False)  # the original and `WARM`
    cache: PrefixCache = field(init=False)
    data: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.original, self.cache = _cache(self.config), _cache(self.config)
        draw = random.Random(self.seed)
        names: list[Hashable] = [None, "tenant", ("a", 1, b"\xff")]
        known: list[int] = []
        for number in range(9):
            known = known[: draw.randrange(len(known) + 1)]
            known = known + [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
            put(self.original, names[draw.randrange(3)], known, number if self.seed % 2 else 0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "seed"
            self.original.save(path)
            self.data = path.read_bytes()
            self.merged = _cache(self.config)
            self.merged.load(path)
        put(self.merged, *WARM)

    def run(self, path: Path, *, salvage: bool, forged: bool, warm: bool) -> bool:
        """Load a mutant and say what is wrong by raising; returns whether it was loaded."""
        cache = self.cache
        cache.clear()
        if warm:
            put(cache, *WARM)
        before = cache.render(), cache.pool.ref_count.tobytes()
        try:
            cache.load(path, salvage=salvage)
        except SnapshotError:
            cache.check()
            assert (cache.render(), cache.pool.ref_count.tobytes()) == before, (
                "a failed load changed it"
            )
            return False
        cache.check()
        if forged:
            return True
        oracle = self.merged if warm else self.original
        for namespace, tokens in leaves(cache):
            found, content = stored(cache, namespace, tokens)
            assert found == tokens.size
            known, expected = stored(oracle, namespace, tokens)
            assert found == known, f"a hit on what was never saved: {namespace!r}, {tokens!r}"
            assert content == expected, f"another page's bytes: {namespace!r}, {tokens!r}"
        return True


def mutate(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """One to four changes: bits, bytes, runs; copied, moved, cut out, put in, from another file."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        # Half of the changes go to the first part, where sizes and the tree are.
        limit = draw.choice((len(out), min(len(out), 700)))
        at = draw.randrange(max(1, limit))
        size = draw.choice((1, 2, 4, 8, draw.randrange(1, 200)))
        kind = draw.randrange(9)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            out[at : at + size] = draw.randbytes(size)
        elif kind == 2:
            value = draw.choice((0, 1, 0x7F, 0x80, 0xFF, 0x90, 0xDF, 0xC6, 0xDD))
            out[at : at + size] = bytes([value]) * size
        elif kind == 3:
            del out[at : at + size]
        elif kind == 4:
            out[at:at] = draw.randbytes(size)
        elif kind == 5:
            source = draw.randrange(max(1, len(out)))
            out[at : at + size] = out[source : source + size]
        elif kind == 6:
            out[at : at + size] = other[at : at + size]
        elif kind == 7:
            number = draw.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
            width = draw.choice((4, 8))
            out[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
        else:
            out = out[: draw.randrange(len(out) + 1)]
    return bytes(out)


def mutate_tree(data: bytes, draw: random.Random) -> bytes:
    """A change of one value of the tree or header, packed again: it is read as msgpack."""
    preamble = format_._PREAMBLE
    _, _, header_bytes, tree_bytes, *_ = preamble.unpack(data[: preamble.size])
    stop = preamble.size + header_bytes + tree_bytes
    header = msgpack.unpackb(data[preamble.size :][:header_bytes], strict_map_key=False)
    tree = msgpack.unpackb(data[preamble.size + header_bytes : stop], strict_map_key=False)
    odd: list[Any] = [None, -1, 0, 2**63, "", b"", [], {}, [[]] * 5, 1.5, "x" * 300, b"\0" * 64]
    place = draw.choice([header, header["layout"], header["counts"], tree, tree, tree, tree])
    name = draw.choice(list(place))
    value = place[name]
    if isinstance(value, bytes) and value and draw.randrange(4):
        column = np.frombuffer(value, dtype=np.uint8).copy()
        for _ in range(draw.choice((1, 2, 8))):
            column[draw.randrange(column.size)] = draw.choice((0, 1, 2, 3, 4, 127, 128, 254, 255))
        place[name] = column.tobytes()[: draw.choice((None, None, None, -4, -8))]
    else:
        place[name] = draw.choice(odd)
    head, body = msgpack.packb(header), msgpack.packb(tree)
    start = format_._round_up(stop, format_._PAGES_ALIGN)
    now = preamble.size + len(head) + len(body)
    gap = bytes(format_._round_up(now, format_._PAGES_ALIGN) - now)
    fields = (format_.MAGIC, format_.FORMAT_VERSION, len(head), len(body), 0, 0, 0)
    return bytes(preamble.pack(*fields) + head + body + gap + data[start:])


def forge(data: bytes, page_bytes: int) -> bytes:
    """The same bytes with all checksums, and the size, made to fit."""
    preamble = format_._PREAMBLE
    if len(data) < preamble.size:
        return data
    _, _, header_bytes, tree_bytes, *_ = preamble.unpack(data[: preamble.size])
    stop = preamble.size + header_bytes + tree_bytes
    base = format_._checksum(data[preamble.size : stop])
    fields = (format_.MAGIC, format_.FORMAT_VERSION, header_bytes, tree_bytes, len(data), base)
    head = preamble.pack(*fields, format_._checksum(preamble.pack(*fields, 0)[:-8]))
    out = bytearray(head + data[preamble.size :])
    at, place = format_._round_up(stop, format_._PAGES_ALIGN), 0
    stride = format_._round_up(page_bytes + 8, format_._RECORD_ALIGN)
    while at + stride <= len(out):
        digest = format_._checksum(bytes(out[at : at + page_bytes]), base + place)
        out[at + page_bytes : at + page_bytes + 8] = digest.to_bytes(8, "little")
        at, place = at + stride, place + 1
    return bytes(out)


def scratch() -> Path:
    """A folder that lies in memory where there is one."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))


@contextlib.contextmanager
def bounded_memory() -> Iterator[Callable[[], int]]:
    """Let no file make this process ask for more; gives the growth of its peak, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    size, _ = map(int, Path("/proc/self/statm").read_text().split()[:2])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size * page + MEMORY_BYTES, limits[1]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield lambda: 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def mutants(count: int, seed: int, *, truncate: bool = False) -> dict[str, int]:
    """Load ``count`` mutants, or files cut short; returns what became of them."""
    targets = [Target(config, number) for number, config in enumerate(SETTINGS)]
    draw = random.Random(seed)
    totals = {"files": 0, "loaded": 0, "refused": 0, "forged": 0, "forged_loaded": 0}
    folder = scratch()
    path = folder / "mutant"
    try:
        with bounded_memory() as growth:
            for number in range(count):
                target = targets[number % len(targets)]
                forged = draw.randrange(2) == 1
                if truncate:
                    data = target.data[: draw.randrange(len(target.data))]
                elif forged and draw.randrange(2):
                    data = mutate_tree(target.data, draw)
                else:
                    data = mutate(target.data, draw.choice(targets).data, draw)
                if forged:
                    data = forge(data, target.original.codec.bytes_per_page)
                path.write_bytes(data)
                salvage, warm = draw.randrange(3) == 0, draw.randrange(4) == 0
                try:
                    loaded = target.run(path, salvage=salvage, forged=forged, warm=warm)
                except BaseException:
                    kept = Path(f"snapshot-mutant-{seed}-{number}")
                    kept.write_bytes(data)
                    print(f"seed {seed}, file {number}: kept as {kept}", file=sys.stderr)
                    raise
                totals["files"] += 1
                totals["loaded" if loaded else "refused"] += 1
                totals["forged"] += forged
                totals["forged_loaded"] += forged and loaded
            totals["peak_growth_bytes"] = growth()
    finally:
        path.unlink(missing_ok=True)
        folder.rmdir()
    return totals


def kills(count: int, seed: int) -> dict[str, int]:
    """Kill writers with SIGKILL at random moments; each time the file must be whole, old or new.

    Two states of a cache are saved in turn over one file by a forked process.
    """
    torch.set_num_threads(1)
    config = KVConfig(dtype="int8", page_size=4)
    spec = KVSpec(num_layers=8, num_kv_heads=4, head_dim=64)
    capacity = 400 * format_.KVCodec(spec, config).bytes_per_page
    config = KVConfig(dtype="int8", page_size=4, capacity=capacity)
    states = []
    for number in range(2):
        cache = PrefixCache(spec, config, backend="torch")
        for tensor in cache.storage.pages:
            tensor.view(torch.uint8).fill_(number + 1)
        with cache.acquire(range(1000 * number, 1000 * number + 1200 + 300 * number)) as lease:  # type: ignore[arg-type]
            lease.commit(lease.num_tokens)
        states.append(cache)
    draw = random.Random(seed)
    folder = Path(tempfile.mkdtemp())
    path = folder / "cache.rkv"
    states[0].save(path)
    start = time.perf_counter()
    for _ in range(5):
        states[1].save(path)
    save_s = (time.perf_counter() - start) / 5
    found = [0, 0]
    halfway = 0
    for _ in range(count):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    for cache in states[::-1]:
                        cache.save(path)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0, 4 * save_s))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        halfway += len(list(folder.iterdir())) - 1
        loaded = PrefixCache(spec, config, backend="torch")
        loaded.load(path)
        loaded.check()
        matches = [
            loaded.match(list(range(1000 * number, 1000 * number + 1200 + 300 * number)))
            for number in range(2)
        ]
        state = matches.index(max(matches))
        assert matches[state] == 1200 + 300 * state and loaded.tree.num_tokens == matches[state]
        pages = np.flatnonzero(loaded.pool.in_tree)
        for tensor in loaded.storage.pages:
            assert bool((tensor.view(torch.uint8)[:, pages] == state + 1).all()), "a mix of two"
        found[state] += 1
    states[0].save(path)  # removes what killed writers left
    assert list(folder.iterdir()) == [path]
    path.unlink()
    folder.rmdir()
    return {"kills": count, "first": found[0], "second": found[1], "left_half_a_file": halfway}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.snapshot", description=__doc__)
    parser.add_argument("--mutants", type=int, default=100_000, help="changed files to load")
    parser.add_argument("--truncations", type=int, default=20_000, help="files cut short to load")
    parser.add_argument("--kills", type=int, default=200, help="writers to kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    print("kills", kills(args.kills, args.seed), flush=True)
    print("mutants", mutants(args.mutants, args.seed), flush=True)
    print("truncations", mutants(args.truncations, args.seed, truncate=True), flush=True)
    print(f"in {time.perf_counter() - start:.0f} s, nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
