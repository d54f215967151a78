"""Moved to `radixkv.integrations.langchain`; this path goes away in a later version."""

import sys
import warnings

from radixkv.integrations import langchain as _home

warnings.warn(
    "radixkv.langchain: moved; import radixkv.integrations.langchain",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = _home
