"""Texts become token ids, by a tokenizer that was tried before it saw data."""
