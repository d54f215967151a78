"""Which tokens are cached, in which pages, and who may use them; see README.md."""
