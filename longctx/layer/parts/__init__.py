"""The parts of a layer: each computes one residual block, and says what it costs.

A part has two kinds of phases. Some run over the whole row, as attention does, head group by head
group. The others run over a tile of tokens, and the schedule strings those of both blocks into one
loop, so that what stands between them exists for one tile only. `cost` gives the part's rows of
the count (longctx/cost/table.py).
"""
