"""transformers' Trainer with exact states and whole checkpoints, and what happens around its
steps."""
