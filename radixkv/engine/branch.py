"""A growing sequence that its owner steers: append, generate, score, fork, truncate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Unpack

from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import SamplingFields, SamplingParams, require_int
from radixkv.engine.core import EngineCore
from radixkv.engine.kept_tokens import kept_tokens
from radixkv.engine.prefill_request import PrefillRequest
from radixkv.engine.results import Result, Sample, Score
from radixkv.engine.sample_request import SampleRequest
from radixkv.engine.score_request import ScoreRequest
from radixkv.errors import CapacityError, EngineClosedError
from radixkv.names import safe_repr
from radixkv.text.vocabulary import decode

if TYPE_CHECKING:
    from radixkv.text import Chat, Conversation, TokenIds


class Branch:
    """Tokens whose pages stay held between calls; `Engine.open` makes it.

    It holds the KV of all its tokens but the last, which is run when something is generated
    or scored after it. Forks share every page; nothing is copied until one of them writes.
    What it computes is found by all others at once, whole pages while it runs, to the token at
    the end; and it finds what others computed. Its pages go back when it is closed, or dropped.
    Use it from one thread at a time.

    Attributes:
        token_ids: all tokens so far.
        cached_tokens: tokens of the opening prompt whose KV was in the cache when it was opened;
            `Result.cached_tokens` says for each call what was there.
        namespace: whose cache it uses.
    """

    def __init__(
        self,
        core: EngineCore,
        token_ids: list[int],
        namespace: Hashable,
        *,
        lease: Lease | None = None,
        cached_tokens: int = 0,
        conversation: Conversation | None = None,
    ) -> None:
        self._core = core
        self._closed = False
        self._lease = lease
        self.token_ids = token_ids
        self.namespace = namespace
        self.cached_tokens = cached_tokens
        self._conversation = conversation
        self._num_ended = 0  # tokens when the last of them ended a sample: that one is no text
        self._shows_special = True  # in the text of the last answer
        core.adopt(self)

    @safe_repr
    def __repr__(self) -> str:
        lease = self._lease
        num_held = 0 if lease is None else lease.num_tokens
        is_closed = self._closed or self._core.is_closed
        return (
            f"of {len(self.token_ids):,} tokens, KV of {num_held:,} held, "
            f"{'closed' if is_closed else 'open'}, on {self._core.name}"
        )

    @property
    def text(self) -> str:
        """The whole sequence decoded, special tokens kept; empty without a tokenizer."""
        tokenizer = self._core.tokenizer
        if tokenizer is None:
            return ""
        return decode(tokenizer, self.token_ids, skip_special_tokens=False)

    def append(self, tail: str | TokenIds | Chat) -> None:
        """Add text, token ids, or chat messages to the end; they are run when needed.

        What the cache has of the whole is held from now on; what it has not is looked for again
        when something is run.

        Messages go on by the model's chat template, up to the opening of the next answer. A
        branch that was opened with a chat then holds the template's tokens for the whole chat,
        what was generated as the assistant's message; where the template has an earlier turn
        otherwise (thoughts left out, white space stripped, other tokens for the same text),
        tokens are replaced from there, and run when needed. In other branches the answer is
        closed as the template closes one, and ``messages`` follow.

        Raises:
            ValueError, TypeError: as for a prompt; the branch is unchanged.
            ContextLengthError: more tokens than the model has positions.
        """
        self._check_open()
        token_ids, conversation = self._core.intake.encode_tail(
            self.token_ids,
            tail,
            self._conversation,
            ended=self._num_ended == len(self.token_ids),
            shows_special=self._shows_special,
        )
        self._core.intake.limits.check_length(len(token_ids), 0)
        self._replace(token_ids)
        if conversation is not self._conversation:  # a new turn
            self._conversation, self._shows_special = conversation, True
        self._num_ended = 0
        num_held = 0 if self._lease is None else self._lease.num_tokens
        more = take_cached(self._core.cache, token_ids[:-1], self.namespace, num_held)
        if more is not None:
            self._hold(more)

    def _replace(self, token_ids: list[int]) -> None:
        """Hold ``token_ids``, with the KV of as many as begin like those until now."""
        pairs = enumerate(zip(self.token_ids, token_ids, strict=False))
        shorter = min(len(self.token_ids), len(token_ids))
        num_same = next((i for i, (old, new) in pairs if old != new), shorter)
        if num_same < len(self.token_ids):
            if num_same:
                self.truncate(num_same)
            else:
                self._hold(None)
        self.token_ids = token_ids

    def generate(
        self,
        params: SamplingParams | None = None,
        *,
        keep: bool | int = True,
        **fields: Unpack[SamplingFields],
    ) -> Result:
        """Continue the branch, and append a sample.

        After a stop string the branch holds the tokens of the sample's text alone; where the stop
        string begins inside a token, what of it comes before is encoded anew. A token that ended
        the sample stays. What was computed of all tokens so far stays held in any case.

        Args:
            keep: which sample is appended: True is the first, False none.

        Raises:
            As `Engine.generate`; the branch is unchanged then.
        """
        self._check_open()
        core = self._core
        chosen = core.intake.sampling_params(params, dict(fields))
        index = _kept_index(keep, chosen.n)
        handed: list[Lease] = []
        core.intake.limits.check_request(self.token_ids, chosen)
        guide = core.intake.make_guide(chosen)
        lease = self._take_fork()
        try:
            request = SampleRequest(
                list(self.token_ids),
                chosen,
                self.namespace,
                core.tokenizer,
                core.intake.eos_token_ids,
                guide=guide,
                lease=lease,
                on_lease=handed.append,
                kept_index=index or 0,
            )
        except BaseException:
            _release([lease])
            raise
        try:
            result: Result = core.run_all([request])[0]
            new_ids: list[int] = []
            num_same = 0
            if index is not None:
                new_ids, num_same = self._kept_ids(result.samples[index], chosen)
        except BaseException:
            _release(handed)
            raise
        self._take_over(handed, len(self.token_ids) + num_same, len(self.token_ids + new_ids))
        if new_ids:
            self.token_ids = self.token_ids + new_ids
            assert index is not None
            if isinstance(result.samples[index].stop_reason, int):
                self._num_ended = len(self.token_ids)
            self._shows_special = not chosen.skip_special_tokens
        return result

    def _kept_ids(self, sample: Sample, params: SamplingParams) -> tuple[list[int], int]:
        """The tokens that a sample appends, and how many of them are its own first ones."""
        token_ids = sample.token_ids
        if not isinstance(sample.stop_reason, str):
            return token_ids, len(token_ids)
        num_same, tail = kept_tokens(
            self._core.tokenizer,
            self.token_ids,
            token_ids,
            sample.text,
            stop=sample.stop_reason,
            skip_special_tokens=params.skip_special_tokens,
            vocab_size=self._core.intake.vocab_size,
        )
        return token_ids[:num_same] + tail, num_same

    def score(self, continuations: Sequence[str | TokenIds]) -> list[Score]:
        """Log-likelihood of each continuation after this branch, as `Engine.score`.

        What was computed of the branch's own tokens stays held.
        """
        self._check_open()
        core = self._core
        tails = core.intake.encode_continuations(self.token_ids, continuations)
        handed: list[Lease] = []
        request = ScoreRequest(
            list(self.token_ids),
            tails,
            self.namespace,
            lease=self._take_fork(),
            on_lease=handed.append,
        )
        try:
            scores: list[Score] = core.run_all([request])[0]
        except BaseException:
            _release(handed)
            raise
        self._take_over(handed, len(self.token_ids), len(self.token_ids))
        return scores

    def fork(self, n: int = 1) -> list[Branch]:
        """``n`` branches with these tokens that share every page with this one."""
        self._check_open()
        require_int("n", n, 1)
        self._sync()
        twins: list[Branch] = []
        try:
            for _ in range(n):
                twin = Branch(
                    self._core,
                    list(self.token_ids),
                    self.namespace,
                    lease=self._take_fork(),
                    cached_tokens=self.cached_tokens,
                    conversation=self._conversation,
                )
                twin._num_ended = self._num_ended
                twin._shows_special = self._shows_special
                twins.append(twin)
        except BaseException:
            for twin in twins:
                twin.close()
            raise
        return twins

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens."""
        self._check_open()
        require_int("num_tokens", num_tokens, 1, len(self.token_ids))
        if num_tokens < self._num_ended:
            self._num_ended = 0
        self.token_ids = self.token_ids[:num_tokens]
        if self._lease is not None and self._lease.num_tokens > num_tokens - 1:
            if num_tokens == 1:
                self._hold(None)
            else:
                self._lease.truncate(num_tokens - 1)

    def close(self) -> None:
        """Give the pages back; what was computed stays cached until it is evicted."""
        self._closed = True
        self._hold(None)

    def recompute(self) -> None:
        """Give up the KV of its tokens; it is computed anew when needed."""
        self._hold(None)

    def _sync(self) -> None:
        """Compute the KV of all tokens but the last, so that forks need not each do it."""
        if len(self.token_ids) < 2:
            return
        if self._lease is not None and self._lease.num_tokens == len(self.token_ids) - 1:
            return
        request = PrefillRequest(self.token_ids[:-1], self.namespace, lease=self._take_fork())
        lease: Lease | None = self._core.run_all([request])[0]
        self._hold(lease)

    def _take_fork(self) -> Lease | None:
        return None if self._lease is None else self._lease.fork()

    def _take_over(self, handed: list[Lease], num_same: int, num_tokens: int) -> None:
        """Hold what a request hands over of the KV of the first ``num_same`` tokens.

        The last of ``num_tokens``, all that the branch has now, is run when more is wanted.
        """
        for lease in handed:
            keep = min(num_same, num_tokens - 1, lease.num_tokens)
            if keep and (self._lease is None or keep > self._lease.num_tokens):
                lease.truncate(keep)
                self._hold(lease)
            else:
                lease.release()

    def _hold(self, lease: Lease | None) -> None:
        if self._lease is not None:
            self._lease.release()
        self._lease = lease

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # A forgotten branch gives its pages back at once. May run at any moment: never wait. When
        # the interpreter ends, modules are empty, and nobody wants the pages back.
        lease = getattr(self, "_lease", None)
        if lease is not None and not _is_ending():
            lease.abandon()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("Branch: expected an open branch, got a closed one; open anew")
        self._core.check_open()

    def __enter__(self) -> Branch:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.token_ids)


def take_cached(
    cache: PrefixCache, token_ids: list[int], namespace: Hashable, num_held: int = 0
) -> Lease | None:
    """A lease on what the cache has of ``token_ids``; None unless that is over ``num_held``.

    No page is taken for the rest, but one if the match ends inside a page: what runs takes more.
    """
    if len(token_ids) <= num_held:
        return None
    num_cached = cache.match(token_ids, namespace=namespace)
    if num_cached <= num_held:
        return None
    try:
        lease = cache.try_acquire(token_ids[:num_cached], namespace=namespace, full=True)
    except CapacityError:  # not even one page for the end: it is looked for again when it runs
        return None
    if lease.num_cached <= num_held:  # evicted in between
        lease.release()
        return None
    lease.truncate(lease.num_cached)
    return lease


def _kept_index(keep: object, num_samples: int) -> int | None:
    if isinstance(keep, bool):
        return 0 if keep else None
    return require_int("keep", keep, 0, num_samples - 1)


def _release(leases: Sequence[Lease | None]) -> None:
    for lease in leases:
        if lease is not None:
            lease.release()
