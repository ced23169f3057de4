"""LoRA in train.py: PEFT makes and saves the adapters, the schedule runs them (model/adapters.py).

adapters.py   what `--lora_r` and its options put on a model; what they cannot, before it is read
merge.py      `longctx merge`: an adapter in its model's weights
foreign.py    an adapter that somebody else made, checked before those are read

A run's checkpoints and final/ are PEFT adapters: `PeftModel.from_pretrained(model, final)`.
"""
