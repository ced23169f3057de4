"""What the schedule knows of transformers' models: the families whose layers it computes, and what
it finds and asks in one model.

    family, families, mixtures, hybrids   how a family's layers differ, and where their weights are
    strangers                             finds parts of a model that the schedule would ignore
    adapters                              reads PEFT's layers
    blocks, matrices                      a model's parameters in blocks, its tokens' matrices
"""
