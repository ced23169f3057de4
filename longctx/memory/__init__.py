"""Decides where everything of a step lives, and moves it. It knows tensors, sizes and rates, no
models.

    what lives where    decide.py, over ladder.py, the search: candidates, counted, levels, place,
                        pending, machine, rates
    activations         store.py, in the page-locked memory of slab.py
    model states        states.py, placed by settle.py, moved by stream.py over lanes.py
    gradients           gradients.py: in parameter.grad, or held on the host (held.py); clipping.py
    AdamW               optimizer.py, a torch optimizer; by_parameter.py has its states
    what others see     guard.py
"""
