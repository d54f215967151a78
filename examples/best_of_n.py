"""Best of n: samples that share their prompt's pages, ranked by a scorer.

The scorer is the model itself: how likely it thinks "Yes" after "Is this ...?". All samples are
judged together. Any function from texts to numbers would do.
"""

from __future__ import annotations

import radixkv
from radixkv.models.small_model import prepare_small_model

TASK = "Write one sentence that sells a water mill to a family with children."
N = 4


def score(engine: radixkv.Engine, text: str) -> float:
    """How much more likely the model says yes than no when asked about ``text``."""
    chat = [{"role": "user", "content": f"Would children like this? Answer Yes or No.\n\n{text}"}]
    yes, no = engine.score(chat, ["Yes", "No"])
    return yes.logprob - no.logprob


def main(engine: radixkv.Engine) -> None:
    """Draw, score and rank; say what the samples shared."""
    chat = [{"role": "user", "content": TASK}]
    result = engine.generate(chat, n=N, temperature=0.9, top_p=0.95, seed=3, max_new_tokens=24)
    prompt = len(result.prompt_token_ids)
    print(f"{N} samples ran {result.metrics.prefill_tokens} prompt tokens, not {N * prompt}")
    before = engine.cache.stats()
    ranked = sorted(result.samples, key=lambda s: score(engine, s.text), reverse=True)
    for place, sample in enumerate(ranked, start=1):
        print(f"{place}. {' '.join(sample.text.split())}")
    after = engine.cache.stats()
    hits, asked = after.hit_tokens - before.hit_tokens, after.lookup_tokens - before.lookup_tokens
    print(f"judging: {hits} of {asked} prompt tokens from the cache")


if __name__ == "__main__":
    with radixkv.Engine.from_pretrained(prepare_small_model(progress=True)) as engine:
        main(engine)
