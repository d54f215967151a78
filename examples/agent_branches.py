"""An agent loop: the model proposes a call, the program answers, the conversation goes on.

Every turn appends to one branch, so the model only ever runs what is new. At each turn two forks
look one step ahead; the one that is more sure of its call goes on.
"""

from __future__ import annotations

import re

import radixkv
from radixkv.models.small_model import prepare_small_model

STOCK = {"flour": 12, "salt": 3, "yeast": 0}
INTRO = """A storekeeper looks things up, one call a line, until all is known.

Task: sugar, tea, rice
Call: count("sugar")
Result: 7
Call: count("tea")
Result: 2
Call: count("rice")
Result: 5
Call: done()

Task: flour, salt, yeast
"""


def answer(call: str) -> str | None:
    """Run one call of the model; None ends the task."""
    found = re.search(r'count\("(\w+)"\)', call)
    if found is None:
        return None
    return str(STOCK.get(found.group(1), "unknown"))


def main(engine: radixkv.Engine) -> None:
    """Let the model call until it is done, at most six times."""
    with engine.open(INTRO) as branch:
        for turn in range(1, 7):
            branch.append("Call:")
            before = engine.stats()
            ahead = branch.fork(2)
            drafts = [
                fork.generate(temperature=t, seed=turn, max_new_tokens=12, stop="\n", keep=False)
                for fork, t in zip(ahead, (0.0, 0.7), strict=True)
            ]
            best = max(drafts, key=lambda draft: draft.samples[0].cumulative_logprob)
            for fork in ahead:
                fork.close()
            call = best.text.strip()
            result = answer(call)
            ran = engine.stats().prefill_tokens - before.prefill_tokens
            print(f"{call} -> {result}   ({ran} of {2 * len(branch)} prompt tokens run)")
            if result is None:
                break
            branch.append(f" {call}\nResult: {result}\n")


if __name__ == "__main__":
    with radixkv.Engine.from_pretrained(prepare_small_model(progress=True)) as engine:
        main(engine)
