"""Beam search against greedy: the likelier text, and how few pages the beams take."""

from __future__ import annotations

import radixkv
from radixkv.models.small_model import prepare_small_model

PROMPT = "The old water mill stands by the creek. In spring, when the snow melts,"
WIDTH, NUM_NEW = 4, 20


def main(engine: radixkv.Engine) -> None:
    """Search both ways and compare log-probabilities and pages."""
    greedy = engine.generate(PROMPT, temperature=0, max_new_tokens=NUM_NEW, ignore_eos=True)
    (best,) = greedy.samples
    print(f"greedy  {best.cumulative_logprob:8.3f} {best.text}")
    request = engine.submit(
        PROMPT, radixkv.BeamParams(width=WIDTH, max_new_tokens=NUM_NEW, ignore_eos=True)
    )
    pages = 0
    while not request.done:  # the loop by hand, to look at the pages on the way
        engine.step()
        stats = engine.cache.stats()
        pages = max(pages, stats.pages_private + stats.pages_pinned)
    beams = request.result()
    for number, beam in enumerate(beams.samples, start=1):
        print(f"beam {number}  {beam.cumulative_logprob:8.3f} {beam.text}")
    alone = -(-(len(beams.prompt_token_ids) + NUM_NEW) // engine.cache.config.page_size)
    print(f"{beams.cached_tokens} of {len(beams.prompt_token_ids)} prompt tokens reused")
    print(f"{WIDTH} beams held {pages} pages at the most; apart they would be {WIDTH * alone}")


if __name__ == "__main__":
    with radixkv.Engine.from_pretrained(prepare_small_model(progress=True)) as engine:
        main(engine)
