"""Stop strings, found in a text as it comes.

The match that ends first wins, of those the longest; so the same text stops at the same place,
in whatever pieces it came. Text that may become a stop string is held back until it can't.

A special token is no text that is shown. A stop string that holds the text of one is looked for
in the text with all special tokens in their places, every other one in the text that is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class StopFinder:
    """Holds back what may become one of ``stop``, none of which holds a special token.

    Attributes:
        stopped: the stop string that matched, or None.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped: str | None = None
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=1)
        self._held = ""

    def push(self, fresh: str) -> str:
        """Take the text that comes next; return what is safe to show.

        Complexity: O(fresh text + longest stop string), times stop strings.
        """
        if not self._stop:
            return fresh
        buffer = self._held + fresh
        matches = [
            (at + len(stop), at, stop) for stop in self._stop if (at := buffer.find(stop)) >= 0
        ]
        if matches:
            _, at, self.stopped = min(matches)
            self._held = ""
            return buffer[:at]
        num_held = _num_maybe(buffer, self._stop, self._longest)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def push_special(self, text: str) -> str:
        """Take a special token that is not shown; return what is safe to show."""
        return ""

    def finish(self) -> str:
        """Return what is held: nothing comes any more."""
        held, self._held = self._held, ""
        return held


class SpecialStopFinder(StopFinder):
    """The same where some of ``stop`` hold the text of a special token.

    Args:
        special_texts: of the vocabulary's special tokens.
    """

    def __init__(self, stop: Sequence[str], special_texts: Collection[str]) -> None:
        super().__init__(stop)
        self._raw_stop = tuple(s for s in stop if any(t in s for t in special_texts))
        self._shown_stop = tuple(s for s in stop if s not in self._raw_stop)
        self._is_shown: list[bool] = []  # for each character that is held

    def push(self, fresh: str) -> str:
        return self._push(fresh, is_shown=True)

    def push_special(self, text: str) -> str:
        return self._push(text, is_shown=False)

    def _push(self, fresh: str, *, is_shown: bool) -> str:
        raw = self._held + fresh
        flags = self._is_shown + [is_shown] * len(fresh)
        places = [place for place, flag in enumerate(flags) if flag]  # of shown characters
        shown = "".join(raw[place] for place in places)
        matches = [
            (at + len(stop), at, stop) for stop in self._raw_stop if (at := raw.find(stop)) >= 0
        ]
        matches += [
            (places[at + len(stop) - 1] + 1, places[at], stop)
            for stop in self._shown_stop
            if (at := shown.find(stop)) >= 0
        ]
        if matches:
            _, stop_at, self.stopped = min(matches)
            self._held, self._is_shown = "", []
        else:
            stop_at = len(raw) - _num_maybe(raw, self._raw_stop, self._longest)
            num_shown = _num_maybe(shown, self._shown_stop, self._longest)
            if num_shown:
                stop_at = min(stop_at, places[-num_shown])
            self._held, self._is_shown = raw[stop_at:], flags[stop_at:]
        return "".join(raw[place] for place in places if place < stop_at)

    def finish(self) -> str:
        held = zip(self._held, self._is_shown, strict=True)
        out = "".join(character for character, is_shown in held if is_shown)
        self._held, self._is_shown = "", []
        return out


def make_stop_finder(stop: Sequence[str], special_texts: Collection[str]) -> StopFinder:
    """The finder for ``stop`` in a vocabulary with these special tokens."""
    if any(text in one for text in special_texts for one in stop):
        return SpecialStopFinder(stop, special_texts)
    return StopFinder(stop)


def _num_maybe(buffer: str, stops: Sequence[str], longest: int) -> int:
    """The length of the longest end of ``buffer`` that begins one of ``stops``."""
    for num in range(min(longest - 1, len(buffer)), 0, -1):
        end = buffer[-num:]
        if any(stop.startswith(end) for stop in stops):
            return num
    return 0
