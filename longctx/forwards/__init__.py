"""The forwards that modules of a patched model run instead of their own, on that instance alone.

    causal_forward   ForCausalLM     with labels the loss, in chunks, and logits if they are read
    whole_forward    the same of a vision-language model
    joint_forward    what is around its language model (vision.py)
    tower_forward    its vision tower, by groups of images (tower.py)
    base_forward     its base model  embedding, scheduled layers, final norm
    layer_forward    a decoder layer | with a schedule ours, else Hugging Face's; the hooks of
    norm_forward     the final norm  | engines that gather weights run around them
    classifier_forward  a classifier, of sequences or tokens
    head_forward     lm_head         with labels the loss

The schedule runs in the base model's forward, so whatever calls that in training gets it: the
causal model, with or without labels, a trainer that goes around it, a classifier. Generation and
calls that the schedule does not cover run Hugging Face's own code.
"""
