"""Causal attention over packed documents: the interface that the schedule calls, and its backends.

protocol.py     a pair of functions, forward and backward, over q, k, v
  documents.py    where the documents of a packed batch begin, and which continue which
  backends.py     flash-attn-4, cuDNN, flash, math, and the choice among them
    flash4.py       flash-attn-4's compiled kernels, cached on disk
  cross.py        the same backends for queries to all keys of another document
  prefixes.py     documents that continue others: both calls, merged
  shards.py       the ranks that share rows, and the data of a batch that they exchange
    sharded.py      attention over shared rows: an all-to-all gives a rank all tokens of some heads
"""
