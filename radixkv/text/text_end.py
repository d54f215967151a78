"""The end of a text in tokens: what stands there changes what the next tokens decode to.

Tokens have no text of their own. A SentencePiece decoder takes a space from the first token
and not from others; a character may lie in several tokens; a tokenizer adds a space to what it
takes for the beginning of a text. So the text of some tokens depends on the tokens before them.
Whoever decodes or encodes a part of a text (`TextStream`, `encode_continuation`) does it here.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import islice
from typing import Any

from radixkv.text.vocabulary import decode, encode, vocabulary_of

# The last tokens stand for all if they give this many characters that twice as many of them
# give, too: then the first of them (whose space or mark a decoder may treat in its own way) and
# a character cut in two (at most 4 bytes) are behind what is compared.
OVERLAP = 8

# A text encoded after one of these begins in the middle of a text and, if one of them does not
# merge with its first character, apart from what stands before.
_STARTS = ("\n", ".", "a", "0", "Z", "|")


class TextEnd:
    """The last tokens of a text: as many as a decoder needs to decode what follows.

    Args:
        tokenizer: of transformers.
        token_ids: the whole text; may be empty.
        skip_special_tokens: as texts that go on here are decoded.

    Attributes:
        token_ids: the last tokens, without special ones if those are skipped.
        text: what they decode to; the decoding of all ends so.
        is_beginning: there is nothing, or what stands before a text: a text begins here.

    Complexity: O(1) decodings of a few tokens, as a rule; O(all tokens) at most.
    """

    def __init__(
        self, tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        special_texts = vocabulary_of(tokenizer).special_texts
        skipped: Container[int] = special_texts if skip_special_tokens else ()
        num = OVERLAP
        self.token_ids = _last(token_ids, num, skipped)
        self.text = self.decode(()) if self.token_ids else ""
        while len(self.token_ids) == num:
            longer = _last(token_ids, 2 * num, skipped)
            if len(longer) == num:
                break
            text = decode(tokenizer, longer, skip_special_tokens=skip_special_tokens)
            if len(self.text) > OVERLAP and self.text[-OVERLAP:] == text[-OVERLAP:]:
                break
            num *= 2
            self.token_ids, self.text = longer, text
        names = ("bos_token_id", "eos_token_id", "cls_token_id")
        openings = {getattr(tokenizer, name, None) for name in names}
        self.is_beginning = all(token_id in openings for token_id in reversed(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the last tokens and of ``token_ids`` after them."""
        return decode(
            self._tokenizer,
            [*self.token_ids, *token_ids],
            skip_special_tokens=self._skip_special_tokens,
        )

    def encode(self, piece: str) -> list[int]:
        """Token ids by which the text goes on with ``piece``.

        They decode, after those that stand here, to the text and the piece, where the
        vocabulary has such tokens; else to what the tokenizer makes of both together. Of several
        encodings the first is taken: the piece by itself; as in one with the text before; as
        after one of some other characters.
        """
        tokenizer = self._tokenizer
        alone = encode(tokenizer, piece)
        if self.is_beginning or self.decode(alone) == self.text + piece:
            return alone
        candidates = [alone]
        together = encode(tokenizer, self.text + piece)
        for start in (self.text, *_STARTS):
            head = encode(tokenizer, start)
            whole = together if start == self.text else encode(tokenizer, start + piece)
            if whole[: len(head)] == head:
                candidate = whole[len(head) :]
                if self.decode(candidate) == self.text + piece:
                    return candidate
                candidates.append(candidate)
        # No tokens say it as it is (another case, an unknown character): as in one with the text.
        expected = decode(tokenizer, together, skip_special_tokens=self._skip_special_tokens)
        for candidate in candidates:
            if self.decode(candidate) == expected:
                return candidate
        return alone


def _last(token_ids: Sequence[int], num: int, skipped: Container[int]) -> list[int]:
    """The last ``num`` of ``token_ids`` that are not ``skipped``."""
    if not skipped:
        return list(token_ids[-num:])
    kept = (token_id for token_id in reversed(token_ids) if token_id not in skipped)
    return list(islice(kept, num))[::-1]
