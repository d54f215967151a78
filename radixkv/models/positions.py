"""Up to which position a model can be served: its tables, and RoPE that feels the longest sequence.

RoPE variants whose factors depend on the longest sequence of a batch are served only up to the
length at which they start to: elsewhere a sequence's result would depend on its neighbours. They
are found by comparing what they give, short call against long, and by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from radixkv.models.masks import FAR

_DYNAMIC = ("dynamic", "longrope")
_LOOK_UPS = ("embedding", "index_select", "gather", "__getitem__")
_TOLERANCE = 1e-5  # of cos and sin; a vector's end is computed with other low bits than its middle


def config_ints(config: Any) -> dict[str, int]:
    """Every whole number above one of a config, also nested and in lists, by its path."""
    found: dict[str, int] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                walk(inner, f"{path}.{name}" if path else str(name))
        elif isinstance(value, list | tuple):
            for place, inner in enumerate(value):
                walk(inner, f"{path}[{place}]")
        elif isinstance(value, bool):
            return
        elif isinstance(value, int | float) and value > 1 and int(min(value, FAR * FAR)) == value:
            found[path] = int(value)

    walk(config.to_dict(), "")
    return found


def named_limit(model: Any) -> int | None:
    """Positions that the config names; None if it names no limit."""
    text_config = model.config.get_text_config()
    limit: int | None = getattr(text_config, "max_position_embeddings", None)
    kinds: list[Mapping[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):  # the second in code written for older ones
        rope = getattr(text_config, name, None) or {}
        kinds += [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) not in _DYNAMIC:
            continue
        start = (
            kind.get("original_max_position_embeddings")
            or getattr(text_config, "original_max_position_embeddings", None)
            or getattr(text_config, "max_position_embeddings", None)
        )
        if start is not None:
            limit = int(start) if limit is None else min(limit, int(start))
    return limit


class PositionWatch(TorchFunctionMode):
    """Notes, during one forward, what turns positions into numbers: tables, and modules like RoPE.

    Args:
        positions: those of the run, consecutive. [1, num_tokens] int64.
    Attributes:
        table_rows: positions of the smallest table that was looked up; None if there was none.
    """

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self._positions = positions
        self._first, self._count = int(positions[0, 0]), positions.shape[1]
        self._calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self.table_rows: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _LOOK_UPS:
            self._note(name, [*args, *kwargs.values()])
        return func(*args, **kwargs)

    def _note(self, name: str, given: list[Any]) -> None:
        given = [v for value in given for v in (value if isinstance(value, tuple) else (value,))]
        tensors = [value for value in given if isinstance(value, Tensor)]
        tables = [tensor for tensor in tensors if tensor.is_floating_point()]
        indices = [tensor for tensor in tensors if _is_index(tensor)]
        if len(tables) != 1 or len(indices) != 1:
            return
        dims = [value for value in given if type(value) is int]
        dim = dims[0] if dims and name in ("index_select", "gather") else 0
        offset = self._offset(indices[0])
        if offset is not None and tables[0].dim():
            rows = tables[0].shape[dim] - offset
            self.table_rows = rows if self.table_rows is None else min(self.table_rows, rows)

    def _offset(self, ids: Tensor) -> int | None:
        """What was added to the positions to get ``ids``; None if they are something else."""
        if ids.numel() < self._count:
            return None
        offset = int(ids.flatten()[0]) - self._first
        expected = self._positions[0].to(ids.device) + offset
        for rows in (expected, expected[:, None]):  # each for itself, or for all numbers of its row
            if ids.dim() >= rows.dim() and ids.shape[-rows.dim()] == self._count:
                return offset if offset >= 0 and bool((ids == rows).all()) else None
        return None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Within this block, calls of ``model``'s modules with positions are noted."""

        def note(module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            given = (*args, *keywords.values())
            if any(self._is_positions(value) for value in given) and _tensors(output):
                self._calls.append((module, args, keywords))

        bare = [m for m in model.modules() if next(m.parameters(), None) is None]
        hooks = [m.register_forward_hook(note, with_kwargs=True) for m in bare]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _is_positions(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and _is_index(value)
            and value.shape[-1] == self._count
            and bool((value == self._positions.to(value.device)).all())
        )

    def felt_from(self, limit: int | None, borders: list[int]) -> int | None:
        """The longest length up to which no position's numbers depend on the longest of a batch.

        None if they never do, up to ``limit``. Modules are asked, as they were called, for a few
        positions alone and beside a far one.
        """
        for module, args, keywords in self._calls:

            def ask(
                positions: list[int],
                module: nn.Module = module,
                args: tuple[Any, ...] = args,
                keywords: dict[str, Any] = keywords,
            ) -> list[Tensor]:
                def put(value: Any) -> Any:
                    if not self._is_positions(value):
                        return value
                    rows = torch.tensor(positions, dtype=value.dtype, device=value.device)
                    return rows.expand(*value.shape[:-1], len(positions))

                twin = _copied(module)  # some keep what the longest call left them
                output = twin(*map(put, args), **{k: put(v) for k, v in keywords.items()})
                return _tensors(output)

            felt = _felt_from(ask, limit or FAR, borders)
            if felt is not None:
                limit = felt
        return limit


def _copied(module: nn.Module) -> nn.Module:
    """A copy of ``module`` with buffers of its own, and so its children."""
    twin = copy.copy(module)
    buffers = {name: b if b is None else b.clone() for name, b in module._buffers.items()}
    children = {name: m if m is None else _copied(m) for name, m in module._modules.items()}
    twin.__dict__.update(_buffers=buffers, _modules=children)
    return twin


def _felt_from(
    ask: Callable[[list[int]], list[Tensor]], limit: int, borders: list[int]
) -> int | None:
    def feels(known: int, length: int) -> bool:
        """Whether places within ``known`` get other numbers beside one at ``length - 1``."""
        near = sorted({0, 1, 2, known // 4, known // 2, known - 1} & set(range(known)))
        alone, beside = ask(near), ask([*near, length - 1])
        return any(not _rows_agree(a, b, len(near)) for a, b in zip(alone, beside, strict=True))

    lengths = {1 << k for k in range(2, limit.bit_length())} | {n + 1 for n in borders} | {limit}
    known = 3
    for length in sorted(n for n in lengths if known < n <= limit):
        if not feels(known, length):
            known = length
            continue
        low, high = known, length
        while high - low > 1:
            middle = (low + high) // 2
            if feels(known, middle):
                high = middle
            else:
                low = middle
        return low
    return None


def _rows_agree(alone: Tensor, beside: Tensor, count: int) -> bool:
    if alone.dim() != beside.dim():
        return False
    for dim in range(alone.dim()):
        if alone.shape[dim] == count and beside.shape[dim] == count + 1:
            beside = beside.narrow(dim, 0, count)
    if alone.shape != beside.shape:
        return False
    off = torch.view_as_real(alone - beside) if alone.is_complex() else alone - beside
    return bool((off.float().abs() <= _TOLERANCE).all())


def _is_index(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and tensor.dtype in (torch.int64, torch.int32)


def _tensors(output: Any) -> list[Tensor]:
    """The floating tensors of what a module gave."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() or output.is_complex() else []
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in _tensors(part)]
    return []
