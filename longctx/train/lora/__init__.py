"""LoRA in `longctx train`: PEFT makes and saves the adapters, the schedule runs them
(families/adapters.py).

A run's checkpoints and final/ are PEFT adapters: `PeftModel.from_pretrained(model, final)`.
"""
