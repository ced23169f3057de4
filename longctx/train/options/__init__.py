"""The options of a run: what they are called, what they may be, and how they are read."""
