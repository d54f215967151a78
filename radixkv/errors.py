"""Every error that radixkv raises on its users' account.

    RadixKVError
    ├── CapacityError          the page pool cannot hold what was asked, even after eviction
    ├── ContextLengthError     prompt plus new tokens over the model's positions (a ValueError)
    ├── UnsupportedModelError  a model whose attention cannot be served rightly
    ├── NonFiniteError         NaN or Inf in a model's K, V or logits (a ValueError)
    ├── SnapshotError          a damaged or foreign snapshot
    ├── UnknownOptionError     an option that does not exist (a TypeError and a ValueError)
    ├── EngineClosedError      use after close()
    └── CacheInvariantError    from check() only: a bug in radixkv

Each message says what was asked, what the limit is, and what to do. Parameters out of range
or of the wrong type raise the built-in ValueError and TypeError in the same form.
"""

from __future__ import annotations


class RadixKVError(Exception):
    """Root of all errors of this library."""


class CapacityError(RadixKVError):
    """The page pool cannot hold what was asked; the cache is as it was."""


class ContextLengthError(RadixKVError, ValueError):
    """Prompt plus new tokens exceed the positions that the model has."""


class UnsupportedModelError(RadixKVError):
    """A model whose attention this engine cannot serve rightly; the message names what and why."""


class NonFiniteError(RadixKVError, ValueError):
    """NaN or Inf in K, V or logits; nothing of it was stored or sampled."""


class SnapshotError(RadixKVError):
    """A snapshot that is damaged, of another version, or of another model or KV format."""


class UnknownOptionError(RadixKVError, TypeError, ValueError):
    """An option that does not exist; the message says which one is meant.

    A TypeError, as Python's own for an unknown keyword, and a ValueError, as everything else
    that is wrong with options.
    """


class EngineClosedError(RadixKVError):
    """An engine, branch or lease was used after it was closed."""


class CacheInvariantError(RadixKVError):
    """check() found a wrong count, owner or size: a bug in radixkv, please report it."""
