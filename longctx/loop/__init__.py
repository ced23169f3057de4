"""What a training loop takes beside a patched model: exact AdamW with its states where they fit,
the questions that processes ask each other, and what a step cost.
"""
