"""Predicts what a run needs and takes, before it starts: arithmetic alone, no GPU and no weights.

Bytes, FLOPs and machines are counted in longctx/cost.
"""
