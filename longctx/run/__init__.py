"""A run: options, model, trainer, and what it leaves in its output folder.

checkpoint-N/   whole or absent (checkpoint.py)
final/          the model that `from_pretrained` loads
metrics.jsonl   a line a logged step (callbacks.py); `longctx report` draws it
"""

FINAL = "final"
METRICS = "metrics.jsonl"
