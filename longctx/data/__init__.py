"""Text becomes training rows: documents, tokens, packed rows of `seq_len`, cached.

sources.py, records.py   files, folders, globs, datasets -> checked documents
tokenizer.py             the model's tokenizer, or one trained on the spot
turns.py, values.py      a turn: its role and text, and whether it is trained
fields.py                what stands beside text and turns: given to the template, or refused
preferences.py           pairs and rated answers; groups.py: what they become
chat.py                  conversations through the chat template, in a process with limits
conversation.py          what a template is asked for, and the calls of it
masks.py                 which characters of a conversation are trained
ends.py                  the token that ends an answer
shown.py                 nothing of a conversation is left out of its text unsaid
continuations.py         answers to one prompt, which need no mask
training_templates.py    our templates with generation markers, and whose a tokenizer's is
encoding.py              a document -> token ids, and which of them are trained
encoding_groups.py       a prompt and its answers -> token ids
tokens.py                all records -> token ids, on disk
windows.py               the tokens of a long text, in little memory
packing.py               documents -> rows, without cutting a document that fits
packing_groups.py        prompts with their answers -> rows, never cut apart
batches.py               those rows -> batches in two layouts
rows.py                  all of it, on disk: three Arrow files
cache.py, prune.py       those files: named, checked, deleted when they are no longer used
stream.py                all of it, while training reads
"""
