"""`longctx train` in a clone, for launchers that take a file: `accelerate launch train.py ...`."""

import sys

from longctx.train.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
