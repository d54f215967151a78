"""A growing sequence that its owner steers: append, generate, score, fork, truncate."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from radixkv.cache import Lease
from radixkv.config import SamplingParams
from radixkv.errors import EngineClosedError
from radixkv.request import PrefillRequest, Result, SampleRequest, Score, ScoreRequest

if TYPE_CHECKING:
    from radixkv.engine import Engine
    from radixkv.text import Conversation


class Branch:
    """Tokens whose pages stay held between calls; `Engine.open` makes it.

    It holds the KV of all its tokens but the last, which is run when something is generated
    or scored after it. Forks share every page; nothing is copied until one of them writes.
    Use it from one thread at a time.

    Attributes:
        token_ids: all tokens so far.
        cached_tokens: tokens of the opening prompt whose KV was in the cache.
        namespace: whose cache it uses.
    """

    def __init__(
        self,
        engine: Engine,
        token_ids: list[int],
        namespace: Hashable,
        *,
        lease: Lease | None = None,
        cached_tokens: int = 0,
        conversation: Conversation | None = None,
    ) -> None:
        self._engine = engine
        self._closed = False
        self._lease = lease
        self.token_ids = token_ids
        self.namespace = namespace
        self.cached_tokens = cached_tokens
        self._conversation = conversation
        self._num_ended = 0  # tokens when the last of them ended a sample: that one is no text
        engine.adopt(self)

    def append(self, tail: Any) -> None:
        """Add text, token ids, or chat messages to the end; they are run when needed.

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
        token_ids, conversation = self._engine.encode_tail(
            self.token_ids,
            tail,
            self._conversation,
            ended=self._num_ended == len(self.token_ids),
        )
        self._engine.limits.check_length(len(token_ids), 0)
        self._replace(token_ids)
        self._conversation = conversation
        self._num_ended = 0

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
        self, params: SamplingParams | None = None, *, keep: bool = True, **fields: Any
    ) -> Result:
        """Continue the branch; appends the first sample's tokens unless ``keep=False``.

        Raises:
            As `Engine.generate`; the branch is unchanged then.
        """
        self._check_open()
        engine = self._engine
        chosen = engine.sampling_params(params, fields)
        handed: list[Lease | None] = []
        engine.limits.check_request(self.token_ids, chosen)
        guide = engine.make_guide(chosen)
        lease = self._take_fork()
        try:
            request = SampleRequest(
                list(self.token_ids),
                chosen,
                self.namespace,
                engine.tokenizer,
                engine.eos_token_ids,
                guide=guide,
                lease=lease,
                on_lease=handed.append if keep else None,
            )
        except BaseException:
            _release([lease])
            raise
        try:
            result: Result = engine.run_all([request])[0]
        except BaseException:
            _release(handed)
            raise
        new_ids = result.samples[0].token_ids
        if keep and new_ids:
            self.token_ids = self.token_ids + new_ids
            if isinstance(result.samples[0].stop_reason, int):
                self._num_ended = len(self.token_ids)
            if handed and handed[0] is not None:
                self._hold(handed[0])
        return result

    def score(self, continuations: Sequence[Any]) -> list[Score]:
        """Log-likelihood of each continuation after this branch, as `Engine.score`."""
        self._check_open()
        engine = self._engine
        tails = engine.encode_continuations(self.token_ids, continuations)
        request = ScoreRequest(list(self.token_ids), tails, self.namespace, lease=self._take_fork())
        scores: list[Score] = engine.run_all([request])[0]
        return scores

    def fork(self, n: int = 1) -> list[Branch]:
        """``n`` branches with these tokens that share every page with this one."""
        self._check_open()
        from radixkv.config import require_int

        require_int("n", n, 1)
        self._sync()
        twins: list[Branch] = []
        try:
            for _ in range(n):
                twin = Branch(
                    self._engine,
                    list(self.token_ids),
                    self.namespace,
                    lease=self._take_fork(),
                    cached_tokens=self.cached_tokens,
                    conversation=self._conversation,
                )
                twin._num_ended = self._num_ended
                twins.append(twin)
        except BaseException:
            for twin in twins:
                twin.close()
            raise
        return twins

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens."""
        self._check_open()
        from radixkv.config import require_int

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
        lease: Lease | None = self._engine.run_all([request])[0]
        self._hold(lease)

    def _take_fork(self) -> Lease | None:
        return None if self._lease is None else self._lease.fork()

    def _hold(self, lease: Lease | None) -> None:
        if self._lease is not None:
            self._lease.release()
        self._lease = lease

    def __del__(self) -> None:
        # A forgotten branch gives its pages back at once. May run at any moment: never wait.
        lease = getattr(self, "_lease", None)
        if lease is not None:
            lease.abandon()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("Branch: expected an open branch, got a closed one; open anew")
        self._engine.check_open()

    def __enter__(self) -> Branch:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.token_ids)


def _release(leases: list[Lease | None]) -> None:
    for lease in leases:
        if lease is not None:
            lease.release()
