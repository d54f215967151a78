"""What runs attention over pages: a `Backend` of one cache, and the `StepPlan`s that it makes.

A step of a model has one plan, which all layers are handed. What depends on the cache's formats
alone is kept by the backend, what depends on the step's sequences by the plan, what depends on a
layer's tensors by its `LayerPages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from radixkv.attention.batch import AttentionBatch, KVReads, ScoreRule
from radixkv.attention.layout import KVCodec, LayerPages

PreparedLayer = Callable[[LayerPages, int, Tensor | None, ScoreRule], None]
"""Writes and attends to one layer's pages: called with them, its index, ``k_center``, its rule."""

CopyPages = Callable[[LayerPages, Sequence[tuple[int, int, int]]], None]
"""Copies the first tokens of pages, scales included, in all layers.

Called with the pages of all layers, [num_layers, num_pages, num_kv_heads, page_size, ...] each, and
with copies (source page, target page, tokens); no target is a source as well.
"""


class Backend(ABC):
    """One implementation of paged attention, for pages of one codec.

    Any number of threads may use one at once, on pages that are not the same.

    Attributes:
        name: ``"torch"``, ``"cpu"`` or ``"triton"``: which path runs.
        codec: how K and V are stored.
    """

    name: ClassVar[str]

    def __init__(self, codec: KVCodec) -> None:
        self.codec = codec

    @abstractmethod
    def write_kv(
        self,
        layer: LayerPages,
        slot_mapping: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer_idx: int,
        k_center: Tensor | None = None,
    ) -> None:
        """Quantize new tokens' K and V once and scatter them into their slots.

        Args:
            layer: the pages that are written.
            slot_mapping: [num_tokens] int64.
            k: [num_tokens, num_kv_heads, head_dim]; v: the same with v_head_dim.
            layer_idx: of the layer, for the error.
            k_center: taken off each row of k first. [num_kv_heads, head_dim] float32.
        Raises:
            NonFiniteError: NaN or Inf in k (less its center) or v, or what is not finite as stored;
                nothing is written. A GPU's is raised by `settle`.
        """

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> StepPlan:
        """What the layers of a step have in common."""

    def settle(self) -> None:  # noqa: B027
        """Raise, at the end of a step, what `write_kv` could not know without waiting for a GPU."""

    @property
    def copy_pages(self) -> CopyPages | None:
        """What copies pages on the device; None leaves it to the owner of the pages."""
        return None


class StepPlan(ABC):
    """How one step's tokens are written and attended: made once by its backend, for every layer.

    Attributes:
        backend: that made it.
        batch: which tokens attend to which pages.
    """

    def __init__(self, backend: Backend, batch: AttentionBatch) -> None:
        self.backend, self.batch = backend, batch

    def write(
        self,
        layer: LayerPages,
        k: Tensor,
        v: Tensor,
        *,
        layer_idx: int,
        k_center: Tensor | None = None,
    ) -> None:
        """Write the step's new tokens of one layer; as `Backend.write_kv`."""
        self.backend.write_kv(
            layer, self.batch.slot_mapping, k, v, layer_idx=layer_idx, k_center=k_center
        )

    @abstractmethod
    def attend(self, layer: LayerPages, q: Tensor, rule: ScoreRule) -> Tensor:
        """Attend every new token to its sequence's stored pages, its own chunk's too.

        Any number of threads may call it at once.

        Args:
            q: [num_tokens, num_q_heads, head_dim], any float dtype.
        Returns:
            [num_tokens, num_q_heads, v_head_dim], q's dtype.
        Raises:
            ValueError: a rule, or a number of heads, that does not fit.
        """

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> PreparedLayer | None:
        """`write` and `attend` in one, for layers whose rows lie in the same memory.

        Args:
            q: [num_tokens, num_q_heads, head_dim] float32, as k and v; last dimension contiguous.
            out: what attention gives. [num_tokens, num_q_heads, v_head_dim] float32, contiguous.
        Returns:
            what serves one layer, on this thread; None if that would gain nothing.
        """
        return None

    @property
    def reads(self) -> KVReads:
        """What one layer has read, or will; zeros where nobody counts."""
        return KVReads(0, 0)
