"""For training loops over a patched model: exact AdamW with its states where they fit, agreement
among processes, and the speed and memory of a step.
"""
