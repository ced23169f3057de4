"""A run: options, model, trainer, and what happens around its steps.

What it leaves in its folder is longctx/output's.
"""
