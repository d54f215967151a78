"""Tree search on forks: grow the likeliest text in pieces, keep a frontier, take up what was left.

Best first: the branch with the best mean log-probability is grown by a few sampled pieces. A fork
shares every page with its parent, so a step back to an old branch costs nothing.
"""

from __future__ import annotations

import heapq

import radixkv
from radixkv.models.small_model import prepare_small_model

PROMPT = "Three rules for a good miller: first,"
CHILDREN, PIECE, EXPANSIONS = 3, 5, 5


def main(engine: radixkv.Engine) -> None:
    """Expand the best branch several times, then print the best leaf and what was shared."""
    before = engine.stats()
    root = engine.open(PROMPT)
    # (minus the mean log-probability a token, a number to break ties, its sum, the branch)
    frontier = [(0.0, 0, 0.0, root)]
    best, made = frontier[0], 0
    for expansion in range(EXPANSIONS):
        _, _, total, parent = heapq.heappop(frontier)
        for child in parent.fork(CHILDREN):
            made += 1
            result = child.generate(
                temperature=0.9, seed=100 * expansion + made, max_new_tokens=PIECE
            )
            sample = result.samples[0]
            logprob = total + sample.cumulative_logprob
            num_new = len(child) - len(root)
            node = (-logprob / max(1, num_new), made, logprob, child)
            heapq.heappush(frontier, node)
            best = max(best, node, key=lambda one: (len(one[3]), -one[0]))
        if parent is not root:
            parent.close()
    text = engine.tokenizer.decode(best[3].token_ids[len(root) :])
    print(f"{PROMPT}{text}")
    stats = engine.cache.stats()
    whole = sum(len(node[3]) for node in frontier)
    used = (stats.pages_total - stats.pages_free) * engine.cache.config.page_size
    print(f"{made} branches; {len(frontier)} open ones of {whole} tokens in {used} token slots")
    ran = engine.stats().prefill_tokens - before.prefill_tokens
    print(f"the model ran {ran} prompt tokens for all of them")
    for node in [*frontier, (0.0, 0, 0.0, root)]:
        node[3].close()


if __name__ == "__main__":
    with radixkv.Engine.from_pretrained(prepare_small_model(progress=True)) as engine:
        main(engine)
