"""What one attention call is told besides its rows: which tokens, which pages, which rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.shared_runs import SharedRun
from radixkv.config import require_int, require_real


class KVReads(NamedTuple):
    """How many tokens' K and V one layer's attention reads in a step, each of all KV heads.

    Attributes:
        tokens: read with shared runs read together; pages read twice count twice.
        tokens_alone: if every sequence read its own pages.

    A sliding window is not counted: a layer that has one reads less.
    """

    tokens: int
    tokens_alone: int


@dataclass(eq=False)  # one a step: a frozen one takes three times as long
class AttentionBatch:
    """Which new tokens attend to which pages; built once a step, used by every layer.

    Sequence i has ``query_lens[i]`` new tokens, the last of its ``seq_lens[i]``; their rows in
    q, k and v are ``cu_seqlens_q[i] : cu_seqlens_q[i + 1]``.

    Attributes:
        slot_mapping: slot (page_id * page_size + offset) of each new token. [num_tokens] int64.
        page_table: page ids of each sequence, padded with NULL_PAGE. [num_seqs, max_pages] int32.
        seq_lens: KV length after this step. [num_seqs] int32.
        cu_seqlens_q: cumulative new tokens, first 0. [num_seqs + 1] int32.
        runs: columns of the page table that several sequences share, as
            `radixkv.attention.shared_runs.find_runs` finds them; a backend may read them once, or
            ignore them.
        known_lens: ``seq_lens`` and ``cu_seqlens_q`` as lists, from who has them on the host: no
            backend has to ask a device then.
    """

    slot_mapping: Tensor
    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    runs: tuple[SharedRun, ...] = ()
    known_lens: tuple[list[int], list[int]] | None = None

    @cached_property
    def host_lens(self) -> tuple[list[int], list[int]]:
        """``known_lens``, or the same asked for (a host synchronisation on a GPU)."""
        if self.known_lens is not None:
            return self.known_lens
        return self.seq_lens.tolist(), self.cu_seqlens_q.tolist()

    @cached_property
    def query_lens(self) -> NDArray[np.int64]:
        """New tokens of each sequence, on the host. [num_seqs] int64."""
        starts = np.array(self.host_lens[1], dtype=np.int64)
        return starts[1:] - starts[:-1]


_FLOAT32 = torch.finfo(torch.float32)
_LONGEST = 2**31 - 1  # positions are int32: no window is wider


class RuleTerms(NamedTuple):
    """A `ScoreRule` as compiled code takes it: 0, or None, where there is none of a kind.

    Attributes:
        sinks, alibi_slopes: [num_q_heads] float32, contiguous.
    """

    softmax_scale: float
    window: int
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None


@dataclass(frozen=True)
class ScoreRule:
    """How one layer turns q.k into attention weights.

    Attributes:
        softmax_scale: factor on q.k; any number that float32 holds.
        sliding_window: a query sees this many tokens, itself included, at least 1; None is all.
        softcap: scores become softcap * tanh(score / softcap), before the mask; above 0; None is
            off.
        sinks: a logit per query head that takes part in the softmax alone; -inf takes none.
            [num_q_heads], any float dtype.
        alibi_slopes: slope per query head; adds slope * (key position - query position).
            [num_q_heads], any float dtype.

    Raises:
        ValueError, TypeError: a field that is none of these; named, with its value and range.
    """

    softmax_scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def __post_init__(self) -> None:
        most = _FLOAT32.max
        scale = require_real("softmax_scale", self.softmax_scale, -most, most)
        object.__setattr__(self, "softmax_scale", scale)
        if self.sliding_window is not None:
            window = min(require_int("sliding_window", self.sliding_window, 1), _LONGEST)
            object.__setattr__(self, "sliding_window", window)
        if self.softcap is not None:
            softcap = require_real("softcap", self.softcap, _FLOAT32.tiny, most)
            object.__setattr__(self, "softcap", softcap)
        for name, least in (("sinks", -math.inf), ("alibi_slopes", -most)):
            values = getattr(self, name)
            if values is not None:
                _require_head_values(name, values, least=least)
                if values.requires_grad:  # attention gives rows without a graph
                    object.__setattr__(self, name, values.detach())

    def require_heads(self, num_q_heads: int, device: torch.device) -> None:
        """Raise ValueError unless what it holds of each head is of so many heads on ``device``.

        What runs attention calls it first: a kernel that reads by head would read past an end.
        """
        if self.sinks is None and self.alibi_slopes is None:
            return
        if self._made_for == (num_q_heads, device):
            return
        for name, values in (("sinks", self.sinks), ("alibi_slopes", self.alibi_slopes)):
            if values is None:
                continue
            if values.shape[0] != num_q_heads:
                raise ValueError(
                    f"{name}: expected shape [{num_q_heads}], one value for each query head of q, "
                    f"got {list(values.shape)}"
                )
            if values.device != device:
                raise ValueError(
                    f"{name}: expected a tensor on {device}, where q is, got one on {values.device}"
                )

    @cached_property
    def _made_for(self) -> tuple[int, torch.device] | None:
        """The heads and the device that its values are of; None if they do not agree."""
        per_head = [one for one in (self.sinks, self.alibi_slopes) if one is not None]
        fits = {(one.shape[0], one.device) for one in per_head}
        return fits.pop() if len(fits) == 1 else None

    def terms(self, num_q_heads: int, device: torch.device) -> RuleTerms:
        """The rule for compiled code, once it is known to fit; raises as `require_heads`."""
        self.require_heads(num_q_heads, device)
        kept = self._kept_terms
        return self._make_terms() if kept is None else kept

    @cached_property
    def _kept_terms(self) -> RuleTerms | None:
        """Its terms, for every layer and step; None if they are copies, which see no changes."""
        made = self._make_terms()
        if self.sinks is None and self.alibi_slopes is None:
            return made
        pairs = ((made.sinks, self.sinks), (made.alibi_slopes, self.alibi_slopes))
        shared = all(
            mine is None or own is None or mine.data_ptr() == own.data_ptr() for mine, own in pairs
        )
        return made if shared else None

    def _make_terms(self) -> RuleTerms:
        sinks, slopes = self.sinks, self.alibi_slopes
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
        if slopes is not None:
            slopes = slopes.detach().float().contiguous()
        window, softcap = self.sliding_window or 0, self.softcap or 0.0
        return RuleTerms(self.softmax_scale, window, softcap, sinks, slopes)


def _require_head_values(name: str, values: object, *, least: float) -> None:
    """Raise unless ``values`` are a number a head, from ``least`` on, none NaN or above float32."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(
            f"{name}: expected a floating-point tensor of shape [num_q_heads], got {got}; "
            f"convert it first"
        )
    if values.ndim != 1 or not values.shape[0]:
        raise ValueError(
            f"{name}: expected shape [num_q_heads], one value a query head, got "
            f"{list(values.shape)}"
        )
    if values.is_meta or (values.is_cuda and torch.cuda.is_current_stream_capturing()):
        return  # nothing to look at; what is captured was checked when it ran before
    numbers = values.detach()
    good = (numbers >= least) & (numbers <= _FLOAT32.max)
    if not bool(good.all()):
        bad = int((~good).nonzero()[0])
        what = "finite numbers" if math.isfinite(least) else "finite numbers or -inf"
        raise ValueError(
            f"{name}: expected {what} within float32, got {float(numbers[bad])!r} for query head "
            f"{bad}"
        )
