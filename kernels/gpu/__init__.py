"""GPU kernels over quantized KV pages, in Triton: write, rotate, split, extend, merge, copy.

Page layout: ``radixkv.attention.layout``. Nothing here knows radixkv: the callers pass tensors and
sizes. The pages of a layer are contiguous, so a stored row (one token of one KV head) has one
number,

    row = (page_id * num_kv_heads + head) * PAGE_SIZE + offset                (int64)

its codes begin at ``row * width``, its scales at ``row * num_scales``.

    write    a program takes a few tokens of one head, K and V: rotate, quantize, scatter
    rotate   rows by their Hadamard matrix: queries before attention, outputs of extend after it
    split    one query token a sequence (decode), or many sequences' queries over a run of pages
             that they share: a program reads SPLIT tokens once for all query heads of a KV head
             (and all queries of its tile) and leaves a partial result and its log-sum-exp
    merge    partial results of a query into one; sinks; output rotated back
    extend   several query tokens of a sequence, causal: a tile of them, over a split or over all
    copy     the first tokens of pages, scales included, in all layers

Codes never become real values: K is multiplied as stored and its scales are folded into the
scores, V's into the weights. Half floats hold every int8, fp8 and int4 code exactly; queries,
and weights times V's scales, are first divided by a power of two, which changes no digit.

Splits and tiles lie at fixed token positions, so that a sequence's result does not depend on
what else is in the batch. float8 bytes are read and written by bit operations, alike on GPUs
with and without such types.
"""
