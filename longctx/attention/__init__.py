"""Causal attention over packed documents: the interface that the schedule calls, and its backends.

protocol.py     a pair of functions, forward and backward, over q, k, v
  documents.py    where the documents of a packed batch begin
  backends.py     flash-attn-4, cuDNN, flash, math, and the choice among them
    flash4.py       flash-attn-4's compiled kernels, cached on disk
  shards.py       the ranks that share rows, and the data of a batch that they exchange
    sharded.py      attention over shared rows: an all-to-all gives a rank all tokens of some heads
"""
