"""CPU kernels over quantized KV pages, and for the layers around them, compiled by Numba.

Page layout: ``radixkv.attention.layout``. Nothing here knows torch modules or radixkv: the callers
pass addresses and sizes in one record, and a kernel is one C function ``void(record*)`` that any
number of threads may run at once: each takes the next task from an atomic counter.

How it is built. Row formats and head sizes are compile-time numbers, so one kernel is compiled
per (formats, head sizes, query group) and cached on disk. The inner loops are small *intrinsics*
that emit vector code themselves (`rows.read_codes` turns 16 stored codes into 16 floats in
registers); the walk over sequences, splits and pages around them is plain Numba. Vectors are
``LANES`` floats: 16 with AVX-512, 8 with AVX2, 4 elsewhere (NEON).

    write    check all rows for NaN and Inf; rotate, quantize and scatter each row in registers
    decode   one query token a sequence: a task is (sequence, KV head, split of SPLIT tokens);
             scores of the whole split, one softmax, weighted sum; the last task to finish merges
    shared   splits that several queries attend to, read once for all of them
    extend   several query tokens, or many query heads a KV head: a task is (sequence, KV head,
             tile of queries); K and V tiles are dequantized once, matrix products, online softmax
    linear   what a decoder layer computes besides: products, norms, RoPE

Splits and tiles lie at fixed token positions, so that a sequence's result does not depend on
what else is in the batch, nor on the number of threads.
"""
