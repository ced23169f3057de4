"""One decoder layer with hand-written forward and backward: the schedule and the parts it runs.

    schedule.py      the order of the work: one autograd.Function             x -> y, dy -> dx
      parts/           attention and the MLP, as parts/protocol.py asks for them
        projection.py    a linear layer with its bias; adapters/ has what may be beside it
    router.py        which experts a token goes to, and with which weights
    passes.py        what travels with a batch, and with one pass through one layer
    weights.py       a layer's parameters by name; gradients.py has their gradients

schedule.py has Llama's equations. Norms may also follow the parts, the MLP may have no gate or
another activation, and it may stand beside attention, so that both read norm(x).

Where the next thing goes, and the table that gets its line:

    a part like the MLP    `OverTiles` in parts/protocol.py; a file in parts/, `PARTS`
    a mixer                `OverRow` in parts/protocol.py; a file in parts/, `PARTS`
    a norm                 `NormSpec` in norm_spec.py; `NormClass` of its `Family`
    an adapter             `Adapter` in adapters/protocol.py; `KINDS` in families/adapters.py
    a kept tensor          `Pass.keep` in passes.py; a `Keepable` in the `cost` of its part
    a rate                 `RATE_SHARES` in cost/fitted.py, or a field of `Rates` in cost/rates.py

Letters: T tokens of a batch, D hidden size, F intermediate size, H query heads, K key/value heads,
d head size, r rank of an adapter (in a layer's equations, r is the factor of both residual sums).
"""
