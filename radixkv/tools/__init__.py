"""What the command line does besides asking an engine; see README.md."""
