"""longctx: full fine-tuning of Llama-family models at very long context on one GPU."""

__version__ = "0.1.0"
