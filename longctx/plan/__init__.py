"""What a run will need and take, before anything starts: arithmetic alone, no GPU and no weights.

decide.py     where weights, states, gradients and activations live: what a run does, too
machines.py   GPUs by name: bytes and rates
measure.py    the one that is here, measured
buffers.py    every large buffer by name, in each phase of a step: the GPU's peak
seconds.py    products, attention, bytes and waits: how long a step takes
predict.py    a model, a run and a machine: the plan; the longest row that fits
changes.py    what would make a run fit, as flags
given.py      a plan as a file, for `train.py --plan`
"""
