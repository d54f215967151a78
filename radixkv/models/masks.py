"""What a mask of transformers says at any distance: a causal window, or something else.

transformers builds its masks from a function of two places in a sequence. Asked directly, it tells
at once what happens beyond a window that no short run would reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of batch, head, query place and key place (integers that broadcast): whether it is seen."""

_NEAR = 16  # every place up to here is asked
FAR = 1 << 17  # how far a model without a last position is asked


class NotAWindowError(Exception):
    """A mask shows other tokens than all before a query, or a window of them; says which."""


def places_around(borders: Iterable[int], limit: int) -> Tensor:
    """Places at which a mask could change: around each border and each power of two, and the last.

    Returns:
        Sorted, each once, all below ``limit``. [num_places] int64.
    """
    centers = {*borders, *(1 << k for k in range(limit.bit_length()))}
    found = {*range(_NEAR), limit - 1, limit - 2}
    for center in centers:
        found |= {center - 1, center, center + 1}
    return torch.tensor(sorted(place for place in found if 0 <= place < limit))


def window_of(sees: MaskFunction, places: Tensor) -> int | None:
    """The window of a causal mask, the query itself included; None if it shows all before it.

    Args:
        sees: as transformers gives it to what makes a mask tensor.
        places: as `places_around` gives them; the last is the farthest that is asked.
    Raises:
        NotAWindowError: it is neither.

    Complexity: O(num_places ** 2).
    """
    last = int(places[-1])

    def ask(query: Tensor, back: Tensor) -> Tensor:
        """Whether each query sees the token ``back`` before it, where there is one."""
        key = (query - back).clamp(0, last)
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
        seen: Any = sees(zero, zero, query[None, None], key[None, None])
        return torch.as_tensor(seen, dtype=torch.bool).expand(1, 1, *key.shape)[0, 0]

    def first_unseen(query: int) -> int | None:
        """How far back the nearest token lies that ``query`` does not see; None if it sees all."""
        low, high = 0, 0
        for high in map(int, places[places <= query]):
            if not bool(ask(torch.tensor([[query]]), torch.tensor([[high]]))):
                break
            low = high
        else:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if bool(ask(torch.tensor([[query]]), torch.tensor([[middle]]))):
                low = middle
            else:
                high = middle
        return max(high, 1)

    try:
        ahead = places[:, None] + places[None, 1:] <= last
        if bool((ask(places[:, None], -places[None, 1:]) & ahead).any()):
            raise NotAWindowError("shows tokens that come later: it is not causal")
        window = first_unseen(last)
        if window is not None:
            more = torch.tensor([window - 1, window, window + 1])
            places = torch.cat([places, more[more <= last]]).unique()
        queries, back = places[:, None], places[None]
        seen = ask(queries, back)
        wrong = (seen != (back < (last + 1 if window is None else window))) & (back <= queries)
        if not bool(wrong.any()):
            return window
        if window is not None and window <= last:  # the chunk before the last one is whole
            chunk = first_unseen(last - window) or last - window + 1
            in_chunk = (queries - back) // chunk == queries // chunk
            if bool((seen == in_chunk)[back <= queries].all()):
                raise NotAWindowError(f"is of chunked attention, in chunks of {chunk} tokens")
        query, gone = (int(places[i]) for i in wrong.nonzero()[0])
    except NotAWindowError:
        raise
    except Exception as error:
        raise NotAWindowError(f"cannot be asked for far places ({error})") from error
    verb = "does not see" if window is None or gone < window else "sees"
    raise NotAWindowError(
        f"shows neither all tokens before a token nor a window of them "
        f"(token {query} {verb} token {query - gone})"
    )
