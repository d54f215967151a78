"""How K and V lie in pages, and how attention reads them; see README.md."""
