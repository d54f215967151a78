"""The plain tree answers as the compiled one, to the page id, whatever is asked of both."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import twins
from radixkv.config import EVICTIONS


@pytest.mark.parametrize("page_size", twins.PAGE_SIZES)
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_both_trees_give_the_same_answers_after_each_step(eviction: str, page_size: int) -> None:
    """`python -m fuzz.twins` runs 20,000 steps of each."""
    twins.run_seed(page_size, page_size, eviction, 400)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=600))
def test_both_trees_give_the_same_answers_to_any_calls(data: bytes) -> None:
    twins.run_bytes(data)
