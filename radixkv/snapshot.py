"""Snapshots: what a cache holds, as one file that is whole or is not there.

A preamble, a msgpack header (what the pages mean), the tree as msgpack columns, then one
record a page: its bytes and their checksum. docs/snapshot-format.md draws it. Nothing in a
file is believed before it was checked, and what is read is never larger than the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgpack
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from radixkv import __version__
from radixkv.errors import SnapshotError
from radixkv.pool import NULL_PAGE, PageIds, PagePool
from radixkv.quant import KVCodec, KVFormat, LayerPages
from radixkv.radix import (
    EXPIRED,
    MAX_TOKEN_ID,
    Node,
    RadixTree,
    Root,
    Tokens,
    common_prefix,
    namespace_key,
)
from radixkv.trees import make_tree

FORMAT_VERSION = 1
TOKEN_BYTES = 4  # of a token id in the file, big-endian
_EXPIRED = -(2**63)  # in the file, the priority of what has outlived its time
MAGIC = b"\x89RKV\r\n\x1a\n"  # a text-mode copy changes it
# magic, version, bytes of header and tree, bytes of the file, checksum of header and tree,
# checksum of all before it
_PREAMBLE = struct.Struct("<8sIIQQQQ")
_MAX_HEADER_BYTES = 1 << 20
_MAX_NAMESPACE_BYTES = 4096
_MAX_NAMESPACE_DEPTH = 8
_MAX_PAGE_BYTES = 1 << 31
_PAGES_ALIGN = 4096
_RECORD_ALIGN = 64
_CHECKSUM_BYTES = 8
_CHUNK_BYTES = 1 << 20  # of records that are read or written at a time: they stay in cache

Tell = Callable[[int, int], None]
Path_ = str | os.PathLike[str]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _checksum(data: Any, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=seed % 2**64)


# --- what the pages mean -------------------------------------------------------------------


def layout_of(codec: KVCodec) -> dict[str, int | str]:
    """What a page's bytes mean; two caches may share pages where all of it is equal."""
    spec = codec.spec
    return {
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.v_head_dim or spec.head_dim,
        "model_dtype": str(spec.dtype).removeprefix("torch."),
        "page_size": codec.config.page_size,
        "k_format": _describe(codec.k_format, codec.rotate_k),
        "v_format": _describe(codec.v_format, codec.rotate_v),
        "page_bytes": codec.bytes_per_page,
    }


def _describe(kv_format: KVFormat, rotated: bool) -> str:
    code = str(kv_format.code_dtype).removeprefix("torch.")
    return (
        f"{kv_format.name} version {kv_format.version}, {kv_format.code_width} x {code}, "
        f"{kv_format.num_scales} scales, {'rotated' if rotated else 'not rotated'}"
    )


def require_equal(
    where: str, what: str, found: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    """Raise SnapshotError that names each entry in which a snapshot differs from a cache."""
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    if names:
        parts = [f"{n}: expected {expected.get(n)!r}, got {found.get(n)!r}" for n in names]
        raise SnapshotError(
            f"{where}: is of another {what}; {'; '.join(parts)}; load it where it belongs, or "
            f"save a new one"
        )


# --- namespaces ----------------------------------------------------------------------------


def _plain_namespace(namespace: Any, depth: int = 0) -> Any:
    """``namespace`` if it is equal to itself in any process, as msgpack can hold it."""
    if namespace is None or type(namespace) in (str, bytes, int, bool):
        return int(namespace) if type(namespace) is bool else namespace
    if type(namespace) is tuple and depth < _MAX_NAMESPACE_DEPTH:
        return tuple(_plain_namespace(part, depth + 1) for part in namespace)
    raise TypeError(namespace)


def encode_namespace(namespace: Hashable) -> bytes:
    """The bytes of a namespace that can be saved: None, str, bytes, int, and tuples of these.

    Raises:
        SnapshotError: any other; it names the namespace.
    """
    try:
        packed: bytes = msgpack.packb(_plain_namespace(namespace), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        packed = b""
        cause: Exception | None = error
    else:
        cause = None
    if not packed or len(packed) > _MAX_NAMESPACE_BYTES:
        raise SnapshotError(
            f"namespace: expected None, a str, bytes, an int of 64 bits or a tuple of these, of "
            f"at most {_MAX_NAMESPACE_BYTES} bytes, got {_short(namespace)}; another one does "
            f"not mean the same in another process: clear() it first, or save the other "
            f"namespaces one by one (namespace=...)"
        ) from cause
    return packed


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _decode_namespace(packed: bytes) -> Hashable:
    namespace: Hashable = _plain_namespace(_unpack(packed))
    return namespace


def _unpack(packed: bytes) -> Any:
    """What msgpack holds; sizes are bounded by those of ``packed``."""
    return msgpack.unpackb(
        packed,
        use_list=False,
        raw=False,
        strict_map_key=True,
        max_ext_len=0,
        max_str_len=len(packed),
        max_bin_len=len(packed),
        max_array_len=len(packed),
        max_map_len=min(len(packed), 64),
    )


# --- the tree ------------------------------------------------------------------------------

_COLUMNS = {
    "parent": "<i4",
    "length": "<u4",
    "last_access": "<u4",
    "num_hits": "<i8",
    "priority": "<i8",
    "ttl_s": "<f8",
}


@dataclass(frozen=True)
class SavedTree:
    """A tree as columns, a row a node; parents before children, most recently used first.

    Page ``i`` of the file belongs to the node whose pages, counted in the order of the rows,
    take that place.

    Attributes:
        page_size: tokens a page.
        namespaces: of the roots.
        parent: row of the node above; ``-1 - k`` below the root of namespace ``k``. int32.
        length: tokens of the edge. uint32.
        tokens: of all edges in a row, four bytes each, big-endian.
        last_access: rank of the last use, 0 the oldest. uint32.
        num_hits, priority: of the node. int64.
        ttl_s: seconds until the priority falls; NaN if it does not. float64.
    """

    page_size: int
    namespaces: tuple[Hashable, ...]
    parent: NDArray[np.int32]
    length: NDArray[np.uint32]
    tokens: bytes
    last_access: NDArray[np.uint32]
    num_hits: NDArray[np.int64]
    priority: NDArray[np.int64]
    ttl_s: NDArray[np.float64]

    @cached_property
    def num_pages(self) -> NDArray[np.int64]:
        """Pages of each node."""
        return -(-self.length.astype(np.int64) // self.page_size)

    @cached_property
    def first_page(self) -> NDArray[np.int64]:
        """Place in the file of each node's first page."""
        return np.cumsum(self.num_pages) - self.num_pages

    @cached_property
    def _borders(self) -> list[int]:
        """Where each edge begins in ``tokens``, and where the last one ends."""
        ends: list[int] = (np.cumsum(self.length.astype(np.int64)) * TOKEN_BYTES).tolist()
        return [0, *ends]

    @cached_property
    def _parents(self) -> list[int]:
        parents: list[int] = self.parent.tolist()  # read one by one, faster than from an array
        return parents

    def __len__(self) -> int:
        return len(self.parent)

    def edge(self, row: int) -> Tokens:
        """Tokens of a node's edge."""
        edge = self.tokens[self._borders[row] : self._borders[row + 1]]
        return np.frombuffer(edge, dtype=">u4").astype(np.int32)

    def path(self, row: int) -> tuple[Hashable, list[int]]:
        """The namespace of a node, and the rows from below its root down to it."""
        rows = []
        while row >= 0:
            rows.append(row)
            row = self._parents[row]
        return self.namespaces[-1 - row], rows[::-1]

    def fills(self) -> NDArray[np.int64]:
        """Tokens in each page of the file."""
        fills = np.full(int(self.num_pages.sum()), self.page_size, dtype=np.int64)
        last = self.first_page + self.num_pages - 1
        fills[last] = self.length - (self.num_pages - 1) * self.page_size
        return fills

    def pack(self) -> bytes:
        """As msgpack."""
        columns = {
            name: np.ascontiguousarray(getattr(self, name), dtype=kind).tobytes()
            for name, kind in _COLUMNS.items()
        }
        names = tuple(encode_namespace(namespace) for namespace in self.namespaces)
        packed: bytes = msgpack.packb({"namespaces": names, "tokens": self.tokens, **columns})
        return packed

    @classmethod
    def unpack(cls, packed: bytes, page_size: int) -> SavedTree:
        """Read what `pack` wrote.

        Raises:
            ValueError: it is not that, or no tree; says what is wrong.
        """
        columns = _unpack(packed)
        if not isinstance(columns, dict) or set(columns) != {*_COLUMNS, "namespaces", "tokens"}:
            raise ValueError("its columns are not those of a tree")
        names = columns.pop("namespaces")
        if not isinstance(names, tuple) or not all(
            isinstance(name, bytes) and len(name) <= _MAX_NAMESPACE_BYTES for name in names
        ):
            raise ValueError("its namespaces are no list")
        if not all(isinstance(column, bytes) for column in columns.values()):
            raise ValueError("a column is no bytes")
        tokens = columns.pop("tokens")
        arrays = {name: np.frombuffer(columns[name], dtype=_COLUMNS[name]) for name in _COLUMNS}
        size = len(arrays["parent"])
        if any(len(array) != size for array in arrays.values()):
            raise ValueError("its columns differ in length")
        try:
            namespaces = tuple(_decode_namespace(name) for name in names)
        except TypeError as error:
            raise ValueError("a namespace is none that can be saved") from error
        parent, length = arrays["parent"], arrays["length"]
        above = parent >= 0
        rows = np.arange(size)
        ttl_s = arrays["ttl_s"]
        for wrong, what in (
            (parent >= rows, "a node that comes before the one above it"),
            (parent < -len(namespaces), "a node of no namespace"),
            (length == 0, "an empty edge"),
            ((arrays["num_hits"] < 0), "a negative count of uses"),
            (~((ttl_s >= 0) & (ttl_s < math.inf)) & ~np.isnan(ttl_s), "an impossible time to live"),
        ):
            if wrong.any():
                raise ValueError(f"it has {what}")
        if (length[parent[above]] % page_size).any():
            raise ValueError("it has a node that begins inside a page")
        if int(length.astype(np.int64).sum()) * TOKEN_BYTES != len(tokens):
            raise ValueError("its tokens are not those of its edges")
        if size and int(np.frombuffer(tokens, dtype=">u4").max()) > MAX_TOKEN_ID:
            raise ValueError("it has a token id out of range")
        return cls(page_size, namespaces, tokens=tokens, **arrays)


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
    priorities = [_EXPIRED if n.priority == EXPIRED else max(n.priority, low + 1) for n in nodes]
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


@contextlib.contextmanager
def shown_progress(what: str, shown: bool) -> Iterator[Tell]:
    """A function that shows pages done of all, as a bar on standard error if ``shown``."""
    if not shown:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{what} pages", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# --- writing -------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path_) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` in one step when the block has ended well.

    Written beside it, flushed to the disk, renamed, and the folder flushed. If the block or
    the disk fails, ``path`` is as it was; what a killed process left beside it is removed by
    the next writer.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    _remove_leftovers(target)
    while True:
        beside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.saving")
        number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(number, fcntl.LOCK_EX)  # says that its writer lives
        if os.fstat(number).st_nlink:
            break
        os.close(number)  # taken for a leftover before it was locked
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(number)
            beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_leftovers(target: Path) -> None:
    """Remove unfinished files beside ``target`` whose writers are gone."""
    begin = f".{target.name}."
    for path in list(target.parent.iterdir()):
        if not (path.name.startswith(begin) and path.name.endswith(".saving")):
            continue
        try:
            number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone in the meantime, or another user's
            continue
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # being written
            pass
        finally:
            os.close(number)


def write(
    file: IO[bytes],
    layout: Mapping[str, int | str],
    fingerprint: Mapping[str, str],
    saved: SavedTree,
    fill_rows: Callable[[slice, NDArray[np.uint8]], None],
    tell: Tell,
) -> None:
    """Write a whole snapshot.

    Args:
        fill_rows: puts the bytes of the file's pages in a slice into rows, [pages, page_bytes].
        tell: is told how many pages are written, and of how many.
    """
    page_bytes, num_pages = int(layout["page_bytes"]), int(saved.num_pages.sum())
    tree = saved.pack()
    counts = {
        "namespaces": len(saved.namespaces),
        "nodes": len(saved),
        "tokens": len(saved.tokens) // TOKEN_BYTES,
        "pages": num_pages,
    }
    header: bytes = msgpack.packb(
        {
            "radixkv": __version__,
            "layout": dict(layout),
            "fingerprint": dict(fingerprint),
            "counts": counts,
        }
    )
    body = header + tree
    base = _checksum(body)
    start = _round_up(_PREAMBLE.size + len(body), _PAGES_ALIGN)
    stride = _round_up(page_bytes + _CHECKSUM_BYTES, _RECORD_ALIGN)
    fields = (MAGIC, FORMAT_VERSION, len(header), len(tree), start + stride * num_pages, base)
    checksum = _checksum(_PREAMBLE.pack(*fields, 0)[:-_CHECKSUM_BYTES])
    head = _PREAMBLE.pack(*fields, checksum) + body
    file.write(head + bytes(start - len(head)))
    step = max(1, _CHUNK_BYTES // stride)
    rows = np.zeros((step, stride), dtype=np.uint8)
    for first in range(0, num_pages, step):
        count = min(step, num_pages - first)
        fill_rows(slice(first, first + count), rows[:count, :page_bytes])
        for i in range(count):
            # The seed binds a page to this file and its place in it.
            digest = _checksum(rows[i, :page_bytes], base + first + i)
            rows[i, page_bytes : page_bytes + _CHECKSUM_BYTES] = np.frombuffer(
                digest.to_bytes(_CHECKSUM_BYTES, "little"), dtype=np.uint8
            )
        file.write(rows[:count].data)
        tell(first + count, num_pages)


# --- reading -------------------------------------------------------------------------------


class Snapshot:
    """An open snapshot; preamble, header and tree were checked, pages are as they are read.

    It reads, rather than maps, so that neither a file cut short under it nor a failing disk
    ends the process, and pages of the file are not counted as this process's memory.

    Args:
        path: the file.
        salvage: a file that is shorter or longer than it says is opened too.

    Attributes:
        path, num_bytes: the file and its size.
        version: of the format.
        writer: version of radixkv that wrote it.
        layout: as `layout_of`; fingerprint: of the model, name to digest.
        tree: what is saved.

    Raises:
        FileNotFoundError, OSError: it is not there or cannot be read.
        SnapshotError: it is no snapshot, damaged, or of another version.
    """

    def __init__(self, path: Path_, *, salvage: bool = False) -> None:
        self.path = Path(path)
        self._file = self.path.open("rb", buffering=0)
        try:
            self._read_head(salvage)
        except BaseException:
            self._file.close()
            raise

    def _damaged(self, what: str) -> SnapshotError:
        return SnapshotError(
            f"{self.path}: expected a whole snapshot, got one whose {what}; it is damaged: use "
            f"another copy, or save anew"
        )

    def _read_head(self, salvage: bool) -> None:
        self.num_bytes = os.fstat(self._file.fileno()).st_size
        preamble = self._pread(0, _PREAMBLE.size)
        if not preamble.startswith(MAGIC):
            raise SnapshotError(
                f"{self.path}: expected a snapshot of radixkv, got a file that does not begin "
                f"as one does; was it written by PrefixCache.save?"
            )
        if len(preamble) < _PREAMBLE.size:
            raise self._damaged("preamble is cut short")
        _, self.version, header_bytes, tree_bytes, num_bytes, base, checksum = _PREAMBLE.unpack(
            preamble
        )
        if self.version != FORMAT_VERSION:
            raise SnapshotError(
                f"{self.path}: expected format version {FORMAT_VERSION}, got {self.version}; read "
                f"it with the version of radixkv that wrote it, or save anew"
            )
        if checksum != _checksum(preamble[:-_CHECKSUM_BYTES]):
            raise self._damaged("preamble has another checksum")
        if num_bytes != self.num_bytes and not salvage:
            raise self._damaged(f"size is {self.num_bytes} bytes instead of {num_bytes}")
        body_bytes = header_bytes + tree_bytes
        if header_bytes > _MAX_HEADER_BYTES or _PREAMBLE.size + body_bytes > self.num_bytes:
            raise self._damaged("header or tree is cut short")
        body = self._pread(_PREAMBLE.size, body_bytes)
        if len(body) != body_bytes or base != _checksum(body):
            raise self._damaged("header or tree has another checksum")
        self._base = base
        self._start = _round_up(_PREAMBLE.size + body_bytes, _PAGES_ALIGN)
        try:
            self._read_header(_unpack(body[:header_bytes]))
            self.tree = SavedTree.unpack(body[header_bytes:], self.page_size)
            num_pages = int(self.tree.num_pages.sum())
            if num_bytes != self._start + num_pages * self._stride:
                raise ValueError("its pages are not those of its tree")
        # What msgpack raises: ValueError and its own kinds of it, and these.
        except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
            raise self._damaged(f"content makes no sense: {error or type(error).__name__}") from (
                error
            )

    def _read_header(self, header: Any) -> None:
        names = {"radixkv", "layout", "fingerprint", "counts"}
        if not isinstance(header, dict) or set(header) != names:
            raise ValueError("its header is not that of a snapshot")
        self.writer, self.layout, self.fingerprint = (
            header["radixkv"],
            header["layout"],
            header["fingerprint"],
        )
        if not isinstance(self.writer, str):
            raise ValueError("its writer has no name")
        for entries, kinds in ((self.layout, (int, str)), (self.fingerprint, (str,))):
            if not isinstance(entries, dict) or not all(
                isinstance(name, str) and type(value) in kinds for name, value in entries.items()
            ):
                raise ValueError("its header has an entry of another type")
        for name, most in (("page_size", 256), ("page_bytes", _MAX_PAGE_BYTES)):
            value = self.layout.get(name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"its {name} is out of range")
        self.page_size, self.page_bytes = self.layout["page_size"], self.layout["page_bytes"]
        self._stride = _round_up(self.page_bytes + _CHECKSUM_BYTES, _RECORD_ALIGN)

    def _pread(self, offset: int, size: int) -> bytes:
        # No more than the file has: a forged size must not become memory.
        size = max(0, min(size, self.num_bytes - offset))
        parts = []
        while size and (part := os.pread(self._file.fileno(), min(size, 1 << 30), offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    @property
    def num_pages(self) -> int:
        """Pages of the file."""
        return int(self.tree.num_pages.sum())

    def pages(
        self, wanted: NDArray[np.int64]
    ) -> Iterator[tuple[slice, NDArray[np.uint8], NDArray[np.bool_]]]:
        """Read pages of the file in pieces.

        Args:
            wanted: their places in the file, ascending.
        Yields:
            which of ``wanted``; their bytes, [pages, page_bytes], valid until the next piece;
            whether each has its checksum.
        """
        stride, page_bytes = self._stride, self.page_bytes
        step = max(1, min(_CHUNK_BYTES // stride, len(wanted)))
        buffer = np.empty((step, stride), dtype=np.uint8)
        first = 0
        while first < len(wanted):
            run = wanted[first : first + step]
            jumps = np.flatnonzero(np.diff(run) != 1)
            count = int(jumps[0]) + 1 if jumps.size else len(run)
            rows = buffer[:count]
            at = int(run[0])
            got = self._pread_into(self._start + at * stride, rows.data.cast("B"))
            good = np.zeros(count, dtype=np.bool_)
            for i in range(got // stride):
                digest = rows[i, page_bytes : page_bytes + _CHECKSUM_BYTES].tobytes()
                found = _checksum(rows[i, :page_bytes], self._base + at + i)
                good[i] = int.from_bytes(digest, "little") == found
            yield slice(first, first + count), rows[:, :page_bytes], good
            first += count

    def _pread_into(self, offset: int, view: memoryview) -> int:
        got = 0
        while got < len(view):
            count = os.preadv(self._file.fileno(), [view[got:]], offset + got)
            if not count:
                break
            got += count
        return got

    def damaged_pages(self, tell: Tell = lambda done, total: None) -> list[int]:
        """Read every page; the places in the file of those that have not their checksum."""
        everything = np.arange(self.num_pages)
        bad: list[int] = []
        for piece, _, good in self.pages(everything):
            bad += (piece.start + np.flatnonzero(~good)).tolist()
            tell(piece.stop, self.num_pages)
        return bad

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def merge(target: Path_, sources: Iterable[Path_], *, progress: bool = False) -> int:
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
                        raise files[number]._damaged(f"page {place} has another checksum")
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
                    raise snapshot._damaged(f"page {bad[0]} has another checksum")
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
    if priority == _EXPIRED:  # let it expire again
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
