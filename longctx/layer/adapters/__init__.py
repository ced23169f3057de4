"""Adapters of linear layers inside a pass."""
