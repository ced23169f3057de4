"""Decides where everything of a step lives, and moves it. It knows tensors, sizes and rates, no
models.

    what lives where    ladder.py is the search; candidates, levels, place, pending, machine, rates
    what moves          store.py has activations, in slab.py's memory; states.py weights and AdamW's
                        states, which settle, stream, gradients, held and guard move; optimizer.py
                        is the torch optimizer over all of that
"""
