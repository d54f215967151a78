"""Moved to `radixkv.integrations.llama_index`; this path goes away in a later version."""

import sys
import warnings

from radixkv.integrations import llama_index as _home

warnings.warn(
    "radixkv.llama_index: moved; import radixkv.integrations.llama_index",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = _home
