"""Other libraries on an engine; see README.md."""
