"""What a run does before its first step: options, model, data and the models beside it.

What it leaves in its folder is longctx/train/output's.
"""
