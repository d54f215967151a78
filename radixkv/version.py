"""The version of this package; snapshots and saved measurements name it."""

__version__ = "0.2.0"
