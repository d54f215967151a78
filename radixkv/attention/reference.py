"""The plain backend in torch: what every kernel is compared with, and what runs without one.

Also a float64 reference over dense K and V.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from radixkv.attention.batch import AttentionBatch, KVReads, ScoreRule
from radixkv.attention.formats import KVFormat, hadamard, row_limit
from radixkv.attention.layout import KVCodec, LayerPages
from radixkv.attention.plan import Backend, StepPlan
from radixkv.errors import NonFiniteError

# A query's arithmetic must not depend on its neighbours or on where its chunk began, or
# quantization turns a difference in the last bit into a whole step between codes. Matrix products
# keep every row's order of addition from this many rows on (measured, see tests), if the length
# of the sums is fixed: hence padded rows, and sums over tiles of tokens from position 0.
_MIN_ROWS = 16
TILE = 128
_BLOCK_ROWS = 256  # query rows of a KV head that are attended at once, to bound memory


def _pad_rows(rows: Tensor) -> Tensor:
    """``rows``, [..., num_rows, dim], with zeros up to the least number of rows."""
    missing = _MIN_ROWS - rows.shape[-2]
    return F.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows


def rotate_rows(rows: Tensor) -> Tensor:
    """Rotate rows of any leading shape by their Hadamard matrix; float32."""
    flat = rows.reshape(-1, rows.shape[-1])
    rotated = _pad_rows(flat) @ hadamard(rows.shape[-1], rows.device)
    return rotated[: flat.shape[0]].view(rows.shape)


def encode_rows(
    kv_format: KVFormat, rotate: bool, rows: Tensor, *, name: str, layer_idx: int
) -> tuple[Tensor, Tensor]:
    """Check, rotate and quantize rows of K or V.

    Args:
        rows: shape [num_tokens, num_kv_heads, head_dim].
        name: "K" or "V", for the error.
    Returns:
        codes and scales, as ``KVFormat.quantize`` gives them.
    Raises:
        NonFiniteError: NaN or Inf in ``rows``, or a number that would not be finite as stored;
            names the layer and the heads.
    """
    rows = rows.detach().float()
    _require_below(row_limit(kv_format, rotate), kv_format, rows, name, layer_idx)
    if rotate:
        rows = rotate_rows(rows)
        if kv_format.limit < row_limit(kv_format, rotate):
            _require_below(kv_format.limit, kv_format, rows, name, layer_idx)
    return kv_format.quantize(rows)


def _require_below(
    limit: float, kv_format: KVFormat, rows: Tensor, name: str, layer_idx: int
) -> None:
    good = (rows.abs() < limit).all(dim=-1)
    if not bool(good.all()):
        heads = (~good).any(dim=0).nonzero().flatten().tolist()
        raise non_finite(name, layer_idx, heads, kv_format)


def non_finite(
    name: str, layer_idx: int, heads: Sequence[int], kv_format: KVFormat
) -> NonFiniteError:
    """The error for rows of K or V that are not finite, or would not be as stored."""
    of_model = kv_format.name == "model"
    pages = str(kv_format.code_dtype).removeprefix("torch.") if of_model else kv_format.name
    return NonFiniteError(
        f"{name} of layer {layer_idx}, KV head {', '.join(map(str, heads))}: expected finite "
        f"values that {pages} pages hold, got NaN, Inf or too large a number; check the model's "
        f"weights and dtype (float16 overflows above 65504: try bfloat16 or float32)"
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    # Float8 tensors lack index_put and index_select on some devices; their bytes do not.
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def write_kv(
    codec: KVCodec,
    layer: LayerPages,
    slot_mapping: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layer_idx: int,
    k_center: Tensor | None = None,
) -> None:
    """Quantize new tokens' K and V once and scatter them into their slots.

    Nothing is written if either holds a non-finite value.

    Args:
        slot_mapping: [num_tokens] int64.
        k: [num_tokens, num_kv_heads, head_dim]; v: the same with v_head_dim.
        k_center: taken off each row of k first. [num_kv_heads, head_dim] float32.
    Raises:
        NonFiniteError: NaN or Inf in k (less its center) or v, or what is not finite as stored.
    """
    if k_center is not None:
        k = k.float() - k_center
    coded_k = encode_rows(codec.k_format, codec.rotate_k, k, name="K", layer_idx=layer_idx)
    coded_v = encode_rows(codec.v_format, codec.rotate_v, v, name="V", layer_idx=layer_idx)
    page_size = layer.k_pages.shape[2]
    page_ids, offsets = slot_mapping // page_size, slot_mapping % page_size
    pairs = (
        (layer.k_pages, coded_k[0]),
        (layer.v_pages, coded_v[0]),
        (layer.k_scale, coded_k[1]),
        (layer.v_scale, coded_v[1]),
    )
    for pages, rows in pairs:
        _as_bytes(pages)[page_ids, :, offsets] = _as_bytes(rows)


def read_rows(kv_format: KVFormat, pages: Tensor, scales: Tensor, page_ids: Tensor) -> Tensor:
    """Gather and dequantize whole pages: [num_kv_heads, len(page_ids) * page_size, head_dim].

    The rows stay rotated if they were stored so. float32.
    """
    codes = _as_bytes(pages)[page_ids].transpose(0, 1).flatten(1, 2).view(pages.dtype)
    return kv_format.dequantize(codes, scales[page_ids].transpose(0, 1).flatten(1, 2))


def _visible(
    num_queries: int, seq_len: int, sliding_window: int | None, device: torch.device
) -> Tensor | None:
    """Which keys each query sees: [num_queries, seq_len] bool; None is all of them."""
    if num_queries == 1 and (sliding_window is None or sliding_window >= seq_len):
        return None
    query_pos = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    key_pos = torch.arange(seq_len, device=device)[None, :]
    visible = key_pos <= query_pos
    if sliding_window is not None:
        visible &= key_pos > query_pos - sliding_window
    return visible


def attend_dense(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
    """Causal attention of a sequence's last tokens over its dense K and V, in q's precision.

    Args:
        q: [num_q_heads, num_queries, head_dim]; the queries are the sequence's last tokens.
        k: [num_kv_heads, seq_len, head_dim]; v: the same with v_head_dim.
    Returns:
        [num_q_heads, num_queries, v_head_dim].

    With float64 tensors this is the reference that every backend is compared with.
    """
    num_q_heads, num_queries, _ = q.shape
    num_kv_heads, seq_len, _ = k.shape
    rule.require_heads(num_q_heads, q.device)
    group = num_q_heads // num_kv_heads
    visible = _visible(num_queries, seq_len, rule.sliding_window, q.device)
    # Queries of one KV head form one block of rows, so K is never repeated for them.
    rows = q.reshape(num_kv_heads, group * num_queries, -1)
    if rule.softcap is None and rule.sinks is None and rule.alibi_slopes is None:
        mask = None if visible is None else visible.repeat(group, 1)
        out = F.scaled_dot_product_attention(
            rows[None], k[None], v[None], attn_mask=mask, scale=rule.softmax_scale
        )
        return out.reshape(num_q_heads, num_queries, -1)
    scores = (rows @ k.transpose(1, 2)).mul_(rule.softmax_scale)
    scores = scores.view(num_q_heads, num_queries, seq_len)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if rule.alibi_slopes is not None:
        query_pos = torch.arange(seq_len - num_queries, seq_len, device=q.device)
        distance = torch.arange(seq_len, device=q.device)[None, :] - query_pos[:, None]
        scores = scores + rule.alibi_slopes.to(q.dtype)[:, None, None] * distance
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.to(q.dtype)[:, None, None].expand(-1, num_queries, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = weights.reshape(num_kv_heads, group * num_queries, seq_len)
    return (weights @ v).reshape(num_q_heads, num_queries, -1)


def _sum_tiles(parts: Tensor) -> Tensor:
    """Sum over dim 1 by pairs of neighbours, so that zeros at the end change no bit."""
    while parts.shape[1] > 1:
        if parts.shape[1] % 2:
            parts = torch.cat([parts, torch.zeros_like(parts[:, :1])], dim=1)
        parts = parts[:, 0::2] + parts[:, 1::2]
    return parts[:, 0]


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, seq_len: int, rule: ScoreRule) -> Tensor:
    """As `attend_dense`, in float32, with each query's bits independent of the other queries.

    The same query over the same K and V gives the same bits alone, as the last of a long
    chunk and in the middle of one.

    Args:
        q: [num_q_heads, num_queries, head_dim]; the queries are the sequence's last tokens.
        k: [num_kv_heads, num_tiles * tile, head_dim], finite where it is beyond ``seq_len``;
            v: the same with v_head_dim.
        seq_len: tokens of the sequence.
    Returns:
        [num_q_heads, num_queries, v_head_dim].

    Complexity: as dense attention, but of each block of queries with the tokens that it sees.
    """
    num_q_heads, num_queries, head_dim = q.shape
    num_kv_heads, _, v_head_dim = v.shape
    group = num_q_heads // num_kv_heads
    k_tiles = k.unflatten(1, (-1, TILE))
    v_tiles = v.unflatten(1, (-1, TILE))
    queries = q.reshape(num_kv_heads, group, num_queries, head_dim) * rule.softmax_scale
    first_pos = seq_len - num_queries
    block = max(1, _BLOCK_ROWS // group)
    outs = []
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        num_tiles = (first_pos + stop - 1) // TILE + 1
        outs.append(
            _attend_block(
                queries[:, :, start:stop],
                k_tiles[:, :num_tiles],
                v_tiles[:, :num_tiles],
                first_pos + start,
                rule,
            )
        )
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    return out.reshape(num_q_heads, num_queries, v_head_dim)


def _attend_block(
    q: Tensor, k_tiles: Tensor, v_tiles: Tensor, first_pos: int, rule: ScoreRule
) -> Tensor:
    """Attend scaled queries at ``first_pos`` and after to whole tiles from position 0.

    Args:
        q: [num_kv_heads, group, num_queries, head_dim].
        k_tiles: [num_kv_heads, num_tiles, tile, head_dim]; v_tiles: with v_head_dim.
    Returns:
        [num_kv_heads, group, num_queries, v_head_dim].
    """
    num_kv_heads, group, num_queries, head_dim = q.shape
    num_tiles = k_tiles.shape[1]
    rows = _pad_rows(q.reshape(num_kv_heads, group * num_queries, head_dim))
    num_rows = rows.shape[1]

    def per_row(heads: Tensor) -> Tensor:
        """A value of each query head, for each row: [num_kv_heads, num_rows]."""
        each = heads.float().view(num_kv_heads, group).repeat_interleave(num_queries, dim=1)
        return F.pad(each, (0, num_rows - each.shape[1]))

    many = rows[:, None].expand(-1, num_tiles, -1, -1).reshape(-1, num_rows, head_dim)
    scores = torch.bmm(many, k_tiles.flatten(0, 1).transpose(1, 2))
    scores = scores.view(num_kv_heads, num_tiles, num_rows, TILE)
    if rule.softcap is not None:
        scores = torch.tanh(scores.div_(rule.softcap)).mul_(rule.softcap)
    # Tiles wholly before the first query hide nothing from anyone, unless there is a window.
    plain = rule.sliding_window is None and rule.alibi_slopes is None
    edge = first_pos // TILE if plain else 0
    key_pos = torch.arange(edge * TILE, num_tiles * TILE, device=q.device).view(-1, 1, TILE)
    # Rows beyond the last are padding; they attend as the first query does, and are dropped.
    query_pos = first_pos + torch.arange(num_queries, device=q.device).repeat(group)
    query_pos = F.pad(query_pos, (0, num_rows - query_pos.shape[0]), value=first_pos)[:, None]
    if rule.alibi_slopes is not None:
        scores += per_row(rule.alibi_slopes)[:, None, :, None] * (key_pos - query_pos)
    hidden = key_pos > query_pos
    if rule.sliding_window is not None:
        hidden |= key_pos <= query_pos - rule.sliding_window
    scores[:, edge:].masked_fill_(hidden, float("-inf"))
    top = scores.amax(dim=-1).amax(dim=1)
    if rule.sinks is not None:
        sinks = per_row(rule.sinks)
        top = torch.maximum(top, sinks)
    weights = scores.sub_(top[:, None, :, None]).exp_()
    total = _sum_tiles(weights.sum(dim=-1))
    if rule.sinks is not None:
        total = total + torch.exp(sinks - top)
    parts = torch.bmm(weights.flatten(0, 1), v_tiles.flatten(0, 1))
    out = _sum_tiles(parts.view(num_kv_heads, num_tiles, num_rows, -1)) / total[..., None]
    return out[:, : group * num_queries].view(num_kv_heads, group, num_queries, -1)


def _read_pages(codec: KVCodec, layer: LayerPages, page_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of K and of V of whole pages, as `read_rows` gives them."""
    return (
        read_rows(codec.k_format, layer.k_pages, layer.k_scale, page_ids),
        read_rows(codec.v_format, layer.v_pages, layer.v_scale, page_ids),
    )


def _read_runs(
    codec: KVCodec, layer: LayerPages, batch: AttentionBatch
) -> list[tuple[list[tuple[Tensor, Tensor]], int]]:
    """For each sequence the rows of its shared runs, each read once, and the column after them."""
    shared: list[tuple[list[tuple[Tensor, Tensor]], int]] = [([], 0) for _ in batch.host_lens[0]]
    for run in batch.runs:
        rows = _read_pages(codec, layer, batch.page_table[run.seqs[0], run.start : run.stop].long())
        for seq in run.seqs.tolist():
            shared[seq] = ([*shared[seq][0], rows], run.stop)
    return shared


def paged_attention(
    codec: KVCodec, layer: LayerPages, q: Tensor, batch: AttentionBatch, rule: ScoreRule
) -> Tensor:
    """Attend every new token to its sequence's stored pages, its own chunk's too.

    Args:
        q: [num_tokens, num_q_heads, head_dim], the model's dtype.
    Returns:
        [num_tokens, num_q_heads, v_head_dim], q's dtype.

    Accuracy: float32 arithmetic over the dequantized pages, whatever q's dtype.
    """
    rule.require_heads(q.shape[1], q.device)
    queries = q.float()
    if codec.rotate_k:
        queries = rotate_rows(queries)
    page_size = layer.k_pages.shape[2]
    seq_lens, cu_seqlens_q = batch.host_lens
    shared = _read_runs(codec, layer, batch)
    outs = []
    for i, seq_len in enumerate(seq_lens):
        num_pages, num_slots = -(-seq_len // page_size), -(-seq_len // TILE) * TILE
        parts, start = shared[i]
        page_ids = batch.page_table[i, start:num_pages].long()
        # Whole tiles are read; what is behind the last token may be anything, NaN too.
        page_ids = F.pad(page_ids, (0, -(-num_slots // page_size) - num_pages))
        parts = [*parts, _read_pages(codec, layer, page_ids)]
        k, v = (torch.cat(rows, dim=1) for rows in zip(*parts, strict=True))
        k[:, seq_len:] = 0
        v[:, seq_len:] = 0
        rows = queries[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].transpose(0, 1)
        out = attend_tiles(rows, k[:, :num_slots], v[:, :num_slots], seq_len, rule)
        outs.append(out.transpose(0, 1))
    out = torch.cat(outs)
    if codec.rotate_v:
        out = rotate_rows(out)
    return out.to(q.dtype)


class TorchBackend(Backend):
    """`write_kv` and `paged_attention` of this module."""

    name = "torch"

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
        write_kv(self.codec, layer, slot_mapping, k, v, layer_idx=layer_idx, k_center=k_center)

    def plan(self, batch: AttentionBatch) -> TorchPlan:
        return TorchPlan(self, batch)


class TorchPlan(StepPlan):
    """Nothing is made ready: each layer reads what it needs."""

    def attend(self, layer: LayerPages, q: Tensor, rule: ScoreRule) -> Tensor:
        return paged_attention(self.backend.codec, layer, q, self.batch, rule)

    @property
    def reads(self) -> KVReads:
        alone = sum(self.batch.host_lens[0])
        again = sum((len(run.seqs) - 1) * (run.stop - run.start) for run in self.batch.runs)
        return KVReads(alone - self.backend.codec.config.page_size * again, alone)
