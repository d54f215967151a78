"""Drive the cache against its model for as long as you like: `python -m fuzz.cache --minutes N`.

Each seed is one world; the first failure prints the seed, the step, and the command that
repeats it. See fuzz/README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

import torch

from fuzz.driver import Driver, Seeded, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.cache", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to run")
    parser.add_argument("--seed", type=int, default=None, help="first seed; default: the time")
    parser.add_argument("--steps", type=int, default=120, help="operations a seed")
    parser.add_argument("--once", action="store_true", help="run that one seed alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seed = int(time.time()) if args.seed is None else args.seed
    first, end, compared = seed, time.monotonic() + 60 * args.minutes, 0
    while True:
        try:
            compared += run_seed(seed, args.steps)
        except Exception:
            traceback.print_exc()
            print(
                f"\nseed {seed} failed after {_failing_step(seed, args.steps)} steps; repeat with\n"
                f"    python -m fuzz.cache --seed {seed} --steps {args.steps} --once",
                file=sys.stderr,
            )
            return 1
        seed += 1
        if args.once or time.monotonic() > end:
            print(f"seeds {first} to {seed - 1}: {compared} comparisons, no difference")
            return 0


def _failing_step(seed: int, steps: int) -> int:
    driver = Driver(Seeded(seed), twins=seed % 4 == 3)
    for step in range(steps):
        try:
            driver.step()
        except Exception:  # found again: its trace is printed already
            return step + 1
    return steps


if __name__ == "__main__":
    sys.exit(main())
