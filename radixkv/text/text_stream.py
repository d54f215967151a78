"""Text from tokens, as they come."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from radixkv.text.stop_strings import SpecialStopFinder, make_stop_finder
from radixkv.text.text_end import OVERLAP, TextEnd
from radixkv.text.vocabulary import decode, vocabulary_of

# A window of tokens is decoded again at each push. Past this many it is cut to its last tokens.
_WINDOW = 24

_NO_CHARACTER = "\ufffd"


class TextStream:
    """The text of one sample, as its tokens come.

    It is what the sample adds to the text before it: the decoding of both less the decoding of
    what was there, so that the two texts joined are the text of all tokens. A space at its
    beginning is kept where something stands before, and is the decoder's to take where nothing
    does; bytes that complete a character of the prompt give that character.

    What was returned is never taken back: a character waits until its last byte is there, and
    text that may become a stop string waits until it can't (`radixkv.text.stop_strings` says which
    match wins). The pieces joined are the whole, cut before the stop string if one matched.

    A run of byte pieces (``<0x0A>``, SentencePiece) waits for its end, because one wrong byte
    makes the decoder turn all of it into U+FFFD.

    Args:
        tokenizer: of transformers; None gives no text.
        skip_special_tokens: leave special tokens out.
        stop: strings that end the text; none is ever part of it. One that holds the text of a
            special token matches that token, whether it is left out or not.
        after: the tokens that stand before, empty where a text begins; for several samples of
            one prompt, its `TextEnd` (made with the same ``skip_special_tokens``).
    Raises:
        ValueError: stop strings without a tokenizer, or an empty one.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        after: Sequence[int] | TextEnd = (),
    ) -> None:
        if tokenizer is None and stop:
            raise ValueError(
                f"stop: expected none without a tokenizer, got {list(stop)}; give the engine a "
                f"tokenizer or use stop_token_ids"
            )
        if not all(stop):
            raise ValueError(f"stop: expected strings that are not empty, got {list(stop)}")
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._vocabulary = None if tokenizer is None else vocabulary_of(tokenizer)
        special_texts = {} if self._vocabulary is None else self._vocabulary.special_texts
        self._skipped: Container[int] = special_texts if skip_special_tokens else ()
        self._stops = make_stop_finder(stop, special_texts.values())
        # Of special tokens that are left out: whether their places matter.
        self._marks_specials = skip_special_tokens and isinstance(self._stops, SpecialStopFinder)
        self._pieces: list[str] = []
        self._before = ""  # the prompt's text while its last character may still be completed
        self._window: list[int] = []  # last tokens; what was before them is decoded for good
        self._num_taken = 0  # characters of the window's text that went on
        self._max_window = _WINDOW
        self._finished = False
        if tokenizer is not None:
            self._begin(after)

    @property
    def stopped(self) -> str | None:
        """The stop string that matched, or None."""
        return self._stops.stopped

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
        if self._vocabulary is None or self._stops.stopped is not None:
            return ""
        if self._marks_specials:
            return self._push_marking(token_ids)
        skipped = self._skipped
        return self._push_text([i for i in token_ids if i not in skipped])

    def _push_marking(self, token_ids: Sequence[int]) -> str:
        """`push`, and tell the stop strings where special tokens stand that are left out."""
        assert self._vocabulary is not None
        special_texts = self._vocabulary.special_texts
        out, run = "", []
        for token_id in token_ids:
            if token_id not in special_texts:
                run.append(token_id)
                continue
            out += self._push_text(run) + self._push_special(special_texts[token_id])
            run = []
            if self.stopped is not None:
                return out
        return out + self._push_text(run)

    def _push_text(self, token_ids: list[int]) -> str:
        """Take tokens of which none is left out."""
        if not token_ids:
            return ""
        assert self._vocabulary is not None
        self._window += token_ids
        if self._window[-1] in self._vocabulary.byte_ids:
            return ""
        decoded = self._decode(self._window)
        settled = len(decoded) - decoded.endswith(_NO_CHARACTER)
        if self._before and not self._leave_before(decoded, settled):
            return ""
        fresh = decoded[self._num_taken : settled]
        self._num_taken = max(self._num_taken, settled)
        if len(self._window) > self._max_window:
            self._cut_window(decoded)
        return self._pass_on(fresh)

    def _push_special(self, text: str) -> str:
        """Take a special token that is left out: what waited before it waits no more."""
        out = ""
        if self._window:
            decoded = self._decode(self._window)
            if self._before:
                self._leave_before(decoded, len(decoded))
            fresh = decoded[self._num_taken :]
            self._num_taken = max(self._num_taken, len(decoded))
            out = self._pass_on(fresh)
        if self.stopped is None:
            shown = self._stops.push_special(text)
            if shown:
                self._pieces.append(shown)
            out += shown
        return out

    def finish(self, *, end_token_id: int | None = None) -> str:
        """Return what is still held: the end of the text.

        A character whose last bytes never came is what the tokenizer makes of it, U+FFFD as a
        rule. A second call returns nothing.

        Args:
            end_token_id: the token that ended the sample. It is no text, but a stop string that
                holds its text may match.
        """
        if self._finished:
            return ""
        self._finished = True
        if self._vocabulary is None or self.stopped is not None:
            return ""
        special_texts = self._vocabulary.special_texts
        out = self._push_special(
            "" if end_token_id is None else special_texts.get(end_token_id, "")
        )
        if self.stopped is None:
            held = self._stops.finish()
            if held:
                self._pieces.append(held)
            out += held
        return out

    def _begin(self, after: Sequence[int] | TextEnd) -> None:
        """Take the end of what stands before as the window's first tokens."""
        if not isinstance(after, TextEnd):
            if not len(after):
                return
            after = TextEnd(self._tokenizer, after, skip_special_tokens=self._skip_special_tokens)
        self._window = list(after.token_ids)
        self._num_taken = len(after.text.rstrip(_NO_CHARACTER))
        if self._num_taken < len(after.text):
            self._before = after.text

    def _leave_before(self, decoded: str, settled: int) -> bool:
        """Whether the prompt's last character is known: completed, or cut short for good."""
        if decoded.startswith(self._before):
            if settled < len(self._before):
                return False
            self._num_taken = len(self._before)
        self._before = ""
        return True

    def _decode(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids, skip_special_tokens=self._skip_special_tokens)

    def _cut_window(self, decoded: str) -> None:
        """Keep the window's last tokens, as few as decode to the same end of text."""
        num_kept = OVERLAP
        num_open = len(decoded) - self._num_taken
        while num_kept < len(self._window):
            shorter = self._decode(self._window[-num_kept:])
            overlap = OVERLAP + num_open
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
        stops = self._stops
        out = stops.push(fresh)
        if stops.stopped is not None:
            self._window = []
        if out:
            self._pieces.append(out)
        return out
