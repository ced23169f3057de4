"""One decoder layer with hand-written forward and backward: the schedule and the parts it runs.

    schedule.py     the order of the work: one autograd.Function           x -> y, dy -> dx
      parts/protocol.py    what it asks of a part; parts/table.py has the parts by name
      parts/attention.py   h = x + r o Wo', o = attention(norm(x))         and its cost
        parts/heads.py       a head group's q, k, v: projected, normed, rotated, and back
        parts/wide_norms.py  norms of q and k over all heads together
      parts/mlp.py         y = h + r (silu(n Wg') * (n Wu')) Wd', n = norm(h)      and its cost
      parts/norms.py       norms inside a pass, and after the last layer
    norm_spec.py    how a family's norms compute
    passes.py       what travels with a batch, and with one pass through one layer
    weights.py      a layer's parameters by name, and what a pass computes with
    gradients.py    the gradients of these parameters
    projection.py   a linear layer with its bias and adapter
      adapters/       protocol.py: what it asks of its adapter; lora.py, dora.py
      linear.py       matmuls that round once; weight gradients summed in fp32

These are Llama's equations. Norms may also follow the parts, the MLP may have no gate or another
activation, and it may stand beside attention, so that both read norm(x) (schedule.py).

Where the next thing goes, and the table that gets its line:

    a part like the MLP    `OverTiles` in parts/protocol.py; a file in parts/, `PARTS`
    a mixer                `OverRow` in parts/protocol.py; a file in parts/, `PARTS`
    a norm                 `NormSpec` in norm_spec.py; `NormClass` of its `Family`
    an adapter             `Adapter` in adapters/protocol.py; `KINDS` in model/adapters.py
    a kept tensor          `Pass.keep` in passes.py; a `Keepable` in the `cost` of its part
    a rate                 `RATE_SHARES` in cost/fitted.py, or a field of `Rates` in cost/rates.py

Letters: T tokens of a batch, D hidden size, F intermediate size, H query heads, K key/value heads,
d head size, r rank of an adapter (in a layer's equations, r is the factor of both residual sums).
"""
