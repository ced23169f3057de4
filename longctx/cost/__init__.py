"""The count: what a step computes, allocates and copies, in FLOPs, bytes and seconds.

Parts of the model declare their rows (`table`); one table a model and cut is summed here into the
GPU memory of each moment of a step (`peak`) and into its seconds (`seconds`). No tensor is made and
no device is asked. The search for what to keep (longctx/memory), the plan, the metrics and the
out-of-memory message all read this one count.
"""
