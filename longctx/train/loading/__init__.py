"""A model's files: where a model comes from, and what its files must hold."""
