"""Text from tokens, as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixkv.vocabulary import vocabulary_of

# A window of tokens is decoded again at each push. Past this many it is cut to its last tokens.
_WINDOW = 24
# The cut window must give this many characters of text that the longer one gave: then its first
# token (whose space or mark a decoder may treat in its own way) and a character cut in two
# (at most 4 bytes) are behind what is still held.
_OVERLAP = 8

_NO_CHARACTER = "\ufffd"


class TextStream:
    """The text of one sample, as its tokens come.

    What was returned is never taken back: a character waits until its last byte is there, and
    text that may become a stop string waits until it can't. The pieces joined are the decoding
    of all tokens, cut before the stop string if one matched. The match that ends first wins, of
    those the longest; so the same text stops at the same place, whatever tokens it came in.

    A run of byte pieces (``<0x0A>``, SentencePiece) waits for its end, because one wrong byte
    makes the decoder turn all of it into U+FFFD.

    Args:
        tokenizer: of transformers; None gives no text.
        skip_special_tokens: leave special tokens out.
        stop: strings that end the text; none is ever part of it.
        after: the tokens that stand before: what they make of the first token counts.
    Raises:
        ValueError: stop strings without a tokenizer, or an empty one.

    Attributes:
        stopped: the stop string that matched, or None.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        after: Sequence[int] = (),
    ) -> None:
        if tokenizer is None and stop:
            raise ValueError(
                f"stop: expected none without a tokenizer, got {list(stop)}; give the engine a "
                f"tokenizer or use stop_token_ids"
            )
        if not all(stop):
            raise ValueError(f"stop: expected strings that are not empty, got {list(stop)}")
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(stop)
        self._shared = None if tokenizer is None else vocabulary_of(tokenizer)
        self._pieces: list[str] = []
        self._held = ""  # decoded, but may be the start of a stop string
        self._window: list[int] = []  # last tokens; what was before them is decoded for good
        self._num_taken = 0  # characters of the window's text that went on
        self._max_window = _WINDOW
        self._finished = False

    @property
    def text(self) -> str:
        """All that was returned so far, joined."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is now safe to show.

        Raises:
            ValueError: after ``finish``.

        Complexity: O(tokens pushed), whatever came before.
        """
        if self._finished:
            raise ValueError("push: the stream is finished; make a TextStream for each sample")
        shared = self._shared
        if shared is None or self.stopped is not None:
            return ""
        if self._skip_special_tokens:
            token_ids = [i for i in token_ids if i not in shared.special_ids]
        if not token_ids:
            return ""
        self._window += token_ids
        if self._window[-1] in shared.byte_ids:
            return ""
        decoded = self._decode(self._window)
        settled = len(decoded) - decoded.endswith(_NO_CHARACTER)
        fresh = decoded[self._num_taken : settled]
        self._num_taken = max(self._num_taken, settled)
        if len(self._window) > self._max_window:
            self._cut_window(decoded)
        return self._pass_on(fresh)

    def finish(self) -> str:
        """Return what is still held: the end of the text.

        A character whose last bytes never came is what the tokenizer makes of it, U+FFFD as a
        rule. A second call returns nothing.
        """
        if self._finished:
            return ""
        self._finished = True
        if self._shared is None or self.stopped is not None:
            return ""
        fresh = self._decode(self._window)[self._num_taken :] if self._window else ""
        out = self._pass_on(fresh)
        if self.stopped is None and self._held:
            self._pieces.append(self._held)
            out += self._held
            self._held = ""
        return out

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._shared is not None
        with self._shared.lock:
            text: str = self._tokenizer.decode(
                list(token_ids),
                skip_special_tokens=self._skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        return text

    def _cut_window(self, decoded: str) -> None:
        """Keep the window's last tokens, as few as decode to the same end of text."""
        num_kept = _OVERLAP
        num_open = len(decoded) - self._num_taken
        while num_kept < len(self._window):
            shorter = self._decode(self._window[-num_kept:])
            overlap = _OVERLAP + num_open
            if len(shorter) > overlap and shorter[-overlap:] == decoded[-overlap:]:
                self._window = self._window[-num_kept:]
                self._num_taken = len(shorter) - num_open
                self._max_window = max(_WINDOW, 2 * num_kept)
                return
            num_kept *= 2
        # Tokens without text, or a decoder that looks far back: try again at twice the length,
        # so that the cost stays proportional to the tokens.
        self._max_window = 2 * len(self._window)

    def _pass_on(self, fresh: str) -> str:
        """Look for stop strings in what is held and ``fresh``; return what is safe to show."""
        buffer = self._held + fresh
        matches = [
            (at + len(stop), at, stop) for stop in self._stop if (at := buffer.find(stop)) >= 0
        ]
        if matches:
            _, at, self.stopped = min(matches)
            self._held = ""
            self._window = []
            out = buffer[:at]
        else:
            num_held = self._num_maybe_stop(buffer)
            out = buffer[: len(buffer) - num_held]
            self._held = buffer[len(buffer) - num_held :]
        if out:
            self._pieces.append(out)
        return out

    def _num_maybe_stop(self, buffer: str) -> int:
        """Return the length of the longest end of ``buffer`` that starts a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for num in range(min(longest, len(buffer)), 0, -1):
            end = buffer[-num:]
            if any(stop.startswith(end) for stop in self._stop):
                return num
        return 0
