"""Moved to `radixkv.integrations.prometheus`; this path goes away in a later version."""

import sys
import warnings

from radixkv.integrations import prometheus as _home

warnings.warn(
    "radixkv.metrics: moved; import radixkv.integrations.prometheus",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = _home
