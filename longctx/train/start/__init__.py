"""What a run does before its first step: options, model, data, and reference or teacher models.

What it leaves in its folder is longctx/train/output's.
"""
