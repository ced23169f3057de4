"""Adapters of linear layers inside a pass.

protocol.py   what a projection asks of its adapter
lora.py       LoRA: s (m x) A' B' beside the linear layer
dora.py       DoRA: LoRA whose sum with the weight has a trained length in each row
"""
