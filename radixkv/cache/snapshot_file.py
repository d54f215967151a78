"""The file of a snapshot: its layout, its checks, writing it and reading it.

A preamble, a msgpack header (what the pages mean), the tree as msgpack columns, then one
record a page: its bytes and their checksum. docs/snapshot-format.md draws it. Nothing in a
file is believed before it was checked, and what is read is never larger than the file.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from radixkv.attention.formats import KVFormat
from radixkv.attention.layout import KVCodec
from radixkv.cache.tree import MAX_TOKEN_ID, Tokens
from radixkv.errors import SnapshotError
from radixkv.version import __version__

FORMAT_VERSION = 1
TOKEN_BYTES = 4  # of a token id in the file, big-endian
SAVED_EXPIRED = -(2**63)  # in the file, the priority of what has outlived its time
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
PathLike = str | os.PathLike[str]


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


# --- writing -------------------------------------------------------------------------------


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
    ends the process, and pages of the file are not counted as this process's memory. One thread
    at a time may use it.

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

    def __init__(self, path: PathLike, *, salvage: bool = False) -> None:
        self.path = Path(path)
        self._file = self.path.open("rb", buffering=0)
        try:
            self._read_head(salvage)
        except BaseException:
            self._file.close()
            raise

    def damaged(self, what: str) -> SnapshotError:
        return SnapshotError(
            f"{self.path}: expected a whole snapshot, got one whose {what}; it is damaged: use "
            f"another copy, or save anew"
        )

    def _read_head(self, salvage: bool) -> None:
        self.num_bytes = os.fstat(self._file.fileno()).st_size
        preamble = self._read_at(0, _PREAMBLE.size)
        if not preamble.startswith(MAGIC):
            raise SnapshotError(
                f"{self.path}: expected a snapshot of radixkv, got a file that does not begin "
                f"as one does; was it written by PrefixCache.save?"
            )
        if len(preamble) < _PREAMBLE.size:
            raise self.damaged("preamble is cut short")
        _, self.version, header_bytes, tree_bytes, num_bytes, base, checksum = _PREAMBLE.unpack(
            preamble
        )
        if self.version != FORMAT_VERSION:
            raise SnapshotError(
                f"{self.path}: expected format version {FORMAT_VERSION}, got {self.version}; read "
                f"it with the version of radixkv that wrote it, or save anew"
            )
        if checksum != _checksum(preamble[:-_CHECKSUM_BYTES]):
            raise self.damaged("preamble has another checksum")
        if num_bytes != self.num_bytes and not salvage:
            raise self.damaged(f"size is {self.num_bytes} bytes instead of {num_bytes}")
        body_bytes = header_bytes + tree_bytes
        if header_bytes > _MAX_HEADER_BYTES or _PREAMBLE.size + body_bytes > self.num_bytes:
            raise self.damaged("header or tree is cut short")
        body = self._read_at(_PREAMBLE.size, body_bytes)
        if len(body) != body_bytes or base != _checksum(body):
            raise self.damaged("header or tree has another checksum")
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
            raise self.damaged(f"content makes no sense: {error or type(error).__name__}") from (
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

    def _read_at(self, offset: int, size: int) -> bytes:
        # No more than the file has: a forged size must not become memory.
        size = max(0, min(size, self.num_bytes - offset))
        parts = []
        self._file.seek(offset)
        while size and (part := self._file.read(min(size, 1 << 30))):
            parts.append(part)
            size -= len(part)
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
            got = self._read_into(self._start + at * stride, rows.data.cast("B"))
            good = np.zeros(count, dtype=np.bool_)
            for i in range(got // stride):
                digest = rows[i, page_bytes : page_bytes + _CHECKSUM_BYTES].tobytes()
                found = _checksum(rows[i, :page_bytes], self._base + at + i)
                good[i] = int.from_bytes(digest, "little") == found
            yield slice(first, first + count), rows[:, :page_bytes], good
            first += count

    def _read_into(self, offset: int, view: memoryview) -> int:
        got = 0
        self._file.seek(offset)
        while got < len(view):
            count = self._file.readinto(view[got:])
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
