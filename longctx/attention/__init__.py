"""Causal attention over packed documents: what a schedule asks for, and who computes it.

protocol.py     a pair of functions, forward and backward, over q, k, v
  documents.py    where the documents of a packed batch begin
  backends.py     flash-attn-4, cuDNN, flash, math, and the choice among them
    flash4.py       flash-attn-4's kernels: kept on disk, quietly
  shards.py       the ranks that share rows, and what they tell each other of a batch
    sharded.py      attention there: all tokens of some heads, by an all-to-all
"""
