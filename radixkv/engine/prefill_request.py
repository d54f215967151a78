"""Requests for the KV of some tokens and nothing else; branches make them."""

from __future__ import annotations

from collections.abc import Hashable

from radixkv.cache.lease import Lease
from radixkv.engine.request import Request, aborted_error
from radixkv.engine.sampling import SamplerRow
from radixkv.engine.scheduler import Output, Scheduler


class PrefillRequest(Request):
    """Computes the KV of ``prompt_token_ids`` and hands over the lease that holds it."""

    def __init__(
        self, prompt_token_ids: list[int], namespace: Hashable, *, lease: Lease | None = None
    ) -> None:
        super().__init__(prompt_token_ids, None, namespace, lease=lease)

    def start(self, scheduler: Scheduler) -> None:
        seq = self._first_sequence(scheduler)
        seq.logits_from = len(seq.token_ids)
        self._add(seq)

    def on_output(self, output: Output) -> list[SamplerRow]:
        self._count(output)
        seq = output.sequence
        if output.stop == len(seq.token_ids):
            self.cached_tokens = seq.num_cached or 0
            self.finish(self._remove(seq, commit=seq.num_computed, keep_lease=True))
        return []

    def abort(self) -> None:
        """End with an error: there is nothing to hand over."""
        self.fail(aborted_error())
