"""Predicts what a run needs and takes, before it starts: arithmetic alone, no GPU and no weights.

    decide.py     where weights, states, gradients and activations live; a run asks it, too
    predict.py    a model, a run and a machine give a plan; the longest row that fits
    engines.py    what ZeRO, FSDP and several GPUs change in a step
    measure.py    the rates of the machine that is here, measured and kept
    shortage.py   which memory a run lacks, how much and for what
    changes.py    the ways out of a run that does not fit
    given.py      a plan as a file, for `train.py --plan`

Bytes, FLOPs and machines are counted in longctx/cost.
"""
