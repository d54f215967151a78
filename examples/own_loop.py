"""The cache by itself, under a model loop of your own: no transformers, no tokenizer.

Two "requests" share a prompt of 100 tokens. The second one finds its KV in the cache, and its
attention reads the same int8 pages. Random projections stand in for a model.
"""

from __future__ import annotations

import torch

from radixkv import KVConfig, KVSpec, Lease, PrefixCache

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 64


def forward(lease: Lease, embedding: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Run the lease's new tokens through all layers; gives their hidden states."""
    hidden = embedding[torch.from_numpy(lease.token_ids[lease.num_cached :])]
    for layer, weight in enumerate(weights):
        q, k, v = (hidden @ weight).split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        lease.write(layer, k, v)
        out = lease.attend(layer, q)
        hidden = hidden + out.mean(dim=1, keepdim=True)
    return hidden


def main() -> None:
    """Serve two prompts and say how much of each was cached."""
    torch.manual_seed(0)
    spec = KVSpec(num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)
    cache = PrefixCache(spec, KVConfig(dtype="int8", capacity="8MiB"))
    embedding = torch.randn(1000, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    weights = [torch.randn(HEAD_DIM, HEAD_DIM) / HEAD_DIM**0.5 for _ in range(NUM_LAYERS)]
    shared = list(range(100))
    for question in ([900, 901], [950, 951, 952]):
        with cache.acquire(shared + question) as lease:
            hidden = forward(lease, embedding, weights)
            lease.commit()
            print(f"{lease.num_cached} of {lease.num_tokens} tokens cached, {len(hidden)} run")
    cache.check()


if __name__ == "__main__":
    main()
