"""The parts of a layer: each computes one residual block, and declares its cost."""
