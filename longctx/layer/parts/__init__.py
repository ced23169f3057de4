"""The parts of a layer: each computes one residual block, and declares its cost.

A part has two kinds of phases. Some run over the whole row, as attention does, head group by head
group. The others run over a tile of tokens. The schedule runs those of both blocks in one loop, so
that the tensors between the blocks exist for one tile only. `cost` gives the part's rows of the
table of costs (longctx/cost/table.py).
"""
