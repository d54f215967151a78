"""The command `radixkv`; see README.md."""
