"""Builds what DeepSpeed would compile during the tests, in the folder where runs look for it."""

from __future__ import annotations

from longctx.train.engines.builds import build_one_at_a_time

if __name__ == "__main__":
    build_one_at_a_time()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder("CPUAdamBuilder").load()
