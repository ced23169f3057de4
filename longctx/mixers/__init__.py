"""Mixers, as Gated DeltaNet, Mamba 2 and short convolutions, in the schedule: transformers' modules
with our kernels and flash-linear-attention's inside.
"""
