"""A chat that grows in a branch: which messages its tokens are, and how the next ones go on.

A branch that was opened with a chat knows its messages. What is generated after them is the
assistant's next message, and when messages are appended the whole chat is rendered anew: its
tokens are the template's, whatever the template does with earlier turns (drops thoughts, strips
white space). Mostly they begin with those that the branch holds.

A branch that was opened with text or ids knows no messages. There the template shows with an
invented chat how it goes on after an assistant's turn.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixkv.text.chats import MARK, invented_call, render_chat
from radixkv.text.continuations import encode_continuation
from radixkv.text.prompts import encode_prompt, is_sequence
from radixkv.text.text_stream import TextStream
from radixkv.text.tool_calls import find_tool_calls
from radixkv.text.vocabulary import decode, encode, vocabulary_of

_NAME = "messages"  # what errors call them
_END_TOKENS = 8  # most that close a turn
_ELSE = "append text or token ids instead"


@dataclass(frozen=True)
class Conversation:
    """The messages that a branch's first tokens stand for, up to where the next answer begins.

    Attributes:
        messages: as they were given, and what was generated between them.
        num_tokens: how many tokens they are.
        digest: of these tokens; others may stand there after a branch was cut.
        before: the same chat some turns ago, to which a branch may be cut back.
    """

    messages: tuple[Mapping[str, Any], ...]
    num_tokens: int
    digest: bytes
    before: Conversation | None = None


def is_chat(prompt: object) -> bool:
    """Whether a prompt is a list of messages."""
    return is_sequence(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def begin_conversation(prompt: Any, token_ids: Sequence[int]) -> Conversation | None:
    """The conversation that ``prompt``, of these tokens, opens; None if it is no chat."""
    return _conversation(prompt, token_ids, None) if is_chat(prompt) else None


def continue_conversation(
    tokenizer: Any,
    token_ids: Sequence[int],
    messages: Sequence[Any],
    *,
    conversation: Conversation | None,
    ended: bool,
    shows_special: bool,
    eos_token_ids: Collection[int],
    vocab_size: int,
) -> tuple[list[int], Conversation | None]:
    """All token ids of a chat with ``messages`` appended, up to where the next answer begins.

    With a conversation they are the template's over the whole chat. What stands after the
    conversation's tokens is the assistant's message; a message of the assistant that says the
    same, with its calls, may be given first and stands for it. Without a conversation they begin
    with ``token_ids``, less a token that ended the answer where the template closes it itself.

    Args:
        token_ids: all tokens so far.
        conversation: what the first of them are; None if that is not known.
        ended: the last token ended a sample, and is no text.
        shows_special: special tokens inside the answer are part of its text. (Calls are found
            in the text with them in any case.)
        eos_token_ids: tokens that end an answer wherever they stand last.
    Returns:
        The token ids, and what conversation they are; None if that is not known.
    Raises:
        TypeError, ValueError: as `encode_prompt` for a chat; or a template that does not show
            how a chat goes on; or a branch that was cut inside its messages.
    """
    if not is_chat(messages):
        raise TypeError(f"{_NAME}: expected a list of messages, got {type(messages).__name__}")
    turn = _Turn(tokenizer, token_ids, messages, ended, shows_special, eos_token_ids, vocab_size)
    if conversation is None:
        return turn.invent(), None
    found: Conversation | None = conversation
    while found is not None and not _begins(token_ids, found):
        found = found.before
    if found is None:
        raise ValueError(
            f"{_NAME}: expected a branch that ends where its chat does or in the answer, got one "
            f"of {len(token_ids)} tokens that was cut inside; {_ELSE}"
        )
    return turn.go_on(found)


def _conversation(
    messages: Sequence[Any], token_ids: Sequence[int], before: Conversation | None
) -> Conversation:
    kept = tuple(copy.deepcopy(dict(message)) for message in messages)  # they may be edited
    return Conversation(kept, len(token_ids), _digest(token_ids), before)


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(token_ids, np.int64).tobytes()).digest()


def _begins(token_ids: Sequence[int], conversation: Conversation) -> bool:
    num_tokens = conversation.num_tokens
    return num_tokens <= len(token_ids) and (_digest(token_ids[:num_tokens]) == conversation.digest)


def _answers_call(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("tool", "ipython", "function") or "tool_call_id" in message


@dataclass(frozen=True)
class _Turn:
    """One `continue_conversation`; its arguments."""

    tokenizer: Any
    token_ids: Sequence[int]
    messages: Sequence[Any]
    ended: bool
    shows_special: bool
    eos_token_ids: Collection[int]
    vocab_size: int

    def go_on(self, conversation: Conversation) -> tuple[list[int], Conversation | None]:
        """The whole chat by the template; see `continue_conversation`."""
        history = list(conversation.messages)
        num_before = conversation.num_tokens
        candidates: list[list[Any]]
        if num_before == len(self.token_ids):  # nobody has said anything
            candidates = [[*history, *self.messages]]
        else:
            num_kept = self._num_without_end(num_before, self._closing(history))
            candidates = self._answered(history, self.token_ids[:num_kept], num_before)
        refusal: ValueError | None = None
        for chat in candidates:
            try:
                ids = list(render_chat(self.tokenizer, chat, _NAME, return_dict=True)["input_ids"])
            except ValueError as error:
                refusal = refusal or error
                continue
            whole = encode_prompt(None, ids, vocab_size=self.vocab_size, name=_NAME)
            before: Conversation | None = conversation
            while before is not None and not _begins(whole, before):
                before = before.before
            return whole, _conversation(chat, whole, before)
        assert refusal is not None
        if num_before < len(self.token_ids) and _answers_call(self.messages[0]):
            return self.invent(), None  # no call was found in the text; the template wants one
        raise refusal

    def _answered(
        self, history: list[Any], token_ids: Sequence[int], num_before: int
    ) -> list[list[Any]]:
        """The whole chat with what the assistant has said, as it may be told, best first."""
        text = self._text(token_ids, num_before, shows_special=self.shows_special)
        said = {"role": "assistant", "content": text}
        first = self.messages[0]
        if not _answers_call(first):
            content = first.get("content")
            if first.get("role") == "assistant" and (
                first.get("tool_calls")
                or (isinstance(content, str) and content.strip() == text.strip())
            ):
                return [[*history, *self.messages]]
            return [[*history, said, *self.messages]]
        raw = self._text(token_ids, num_before, shows_special=True)
        rest, calls = find_tool_calls(raw)
        if not calls:
            return [[*history, said, *self.messages]]
        answers = [m for m in self.messages if isinstance(m, Mapping) and "tool_call_id" in m]
        for i, call in enumerate(calls):
            call["id"] = answers[i]["tool_call_id"] if i < len(answers) else f"{i:09}"
        called = [*history, {"role": "assistant", "content": rest, "tool_calls": calls}]
        plain = [*history, said]
        candidates = [[*plain, *self.messages], [*called, *self.messages]]
        try:
            shown = render_chat(
                self.tokenizer, called, _NAME, tokenize=False, add_generation_prompt=False
            )
        except ValueError:
            return candidates[:1]
        opened = render_chat(self.tokenizer, history, _NAME, tokenize=False)
        if shown.startswith(opened + raw):  # the template writes the calls as the model did
            candidates.reverse()
        elif not all(call["function"]["name"] in shown for call in calls):
            candidates.pop()  # it leaves them out
        return candidates

    def invent(self) -> list[int]:
        """The tokens so far, and how an invented chat goes on after an assistant's turn."""
        user = {"role": "user", "content": "-"}
        closing = self._closing([user])
        said = {"role": "assistant", "content": MARK}
        tail: str | None = None
        refusal: ValueError | None = None
        try:
            rendered = render_chat(
                self.tokenizer, [user, said, *self.messages], _NAME, tokenize=False
            )
            _, found, tail = rendered.partition(MARK)
            if not found or MARK in tail:
                tail = None
        except ValueError as error:
            refusal = error
        if tail is None and closing is not None and _answers_call(self.messages[0]):
            tail, refusal = self._after_invented_call(user, closing)
        if tail is None:
            raise refusal or ValueError(
                f"{_NAME}: expected a chat template that renders the assistant's text once, as it "
                f"is; {_ELSE}"
            )
        num_kept = self._num_without_end(0, tail if closing is None else closing)
        kept = self.token_ids[:num_kept]
        return [
            *kept,
            *encode_continuation(self.tokenizer, tail, after=kept, vocab_size=self.vocab_size),
        ]

    def _after_invented_call(
        self, user: Mapping[str, Any], closing: str
    ) -> tuple[str | None, ValueError | None]:
        """What follows a turn that calls a tool; or None and why it can't be told."""
        calls: list[dict[str, Any]] = []
        for message in self.messages:
            if not _answers_call(message):
                break
            call_id = message.get("tool_call_id", f"{len(calls):09}")
            calls.append(invented_call(call_id, message.get("name") or "function"))
        called = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            head = render_chat(
                self.tokenizer, [user, called], _NAME, tokenize=False, add_generation_prompt=False
            )
            whole = render_chat(
                self.tokenizer, [user, called, *self.messages], _NAME, tokenize=False
            )
        except ValueError as error:
            return None, error
        if not whole.startswith(head) or not head.endswith(closing):
            return None, None
        return closing + whole[len(head) :], None

    def _closing(self, history: Sequence[Any]) -> str | None:
        """What the template writes after an assistant's text; None if that can't be told."""
        said = {"role": "assistant", "content": MARK}
        try:
            rendered = render_chat(
                self.tokenizer,
                [*history, said],
                _NAME,
                tokenize=False,
                add_generation_prompt=False,
            )
        except ValueError:
            return None  # a template that wants something else after this history
        _, found, closing = rendered.partition(MARK)
        return closing if found and MARK not in closing else None

    def _num_without_end(self, num_before: int, closing: str | None) -> int:
        """How many tokens there are without those that end the turn, the template's own too."""
        num = len(self.token_ids)
        if self.ended and num > num_before:
            num -= 1
        tokenizer = self.tokenizer
        special_texts = vocabulary_of(tokenizer).special_texts
        closings: list[str] = []
        if closing is not None:
            # As its tokens say it, too: some have a space after each special token.
            ids = encode(tokenizer, closing)
            closings = [closing, decode(tokenizer, ids, skip_special_tokens=False)]
        for start in range(max(num_before, num - _END_TOKENS), num):
            first = self.token_ids[start]
            if first in special_texts or first in self.eos_token_ids:
                end = decode(tokenizer, self.token_ids[start:num], skip_special_tokens=False)
                if any(text.startswith(end) for text in closings):
                    return start
        if num > num_before and self.token_ids[num - 1] in self.eos_token_ids:
            num -= 1
        return num

    def _text(self, token_ids: Sequence[int], num_before: int, *, shows_special: bool) -> str:
        """What the tokens after the first ``num_before`` say, as a sample's text does."""
        said = token_ids[num_before:]
        special_texts = vocabulary_of(self.tokenizer).special_texts
        stream = TextStream(
            self.tokenizer,
            skip_special_tokens=not shows_special or not any(i in special_texts for i in said),
            after=token_ids[:num_before],
        )
        return stream.push(said) + stream.finish()
