"""Prompts in, text out; see README.md."""
