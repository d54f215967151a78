"""Moved to `radixkv.integrations.lm_eval`; this path goes away in a later version."""

import sys
import warnings

from radixkv.integrations import lm_eval as _home

warnings.warn(
    "radixkv.lm_eval: moved; import radixkv.integrations.lm_eval", DeprecationWarning, stacklevel=2
)
if __name__ == "__main__":
    _home.main()
sys.modules[__name__] = _home
