"""Runs mixers (Gated DeltaNet, Mamba 2, short convolutions) in the schedule: transformers' modules
with our kernels and flash-linear-attention's.
"""
