"""Trains a step of a tiny model of every causal family of transformers, as Hugging Face's and as
any model (longctx/any_model), and records how the two compare.

    python profiling/any_families.py --output profiling/results/any_families.json

Rows: family, outcome (equal: loss and all gradients have the same bits with the model's own
attention and loss in our checkpoints; differs; refused; not built), the factors with which our loss
is the model's, whether our attention is, and the relative errors of loss and gradients with each;
the relative error of logits when the model generates with its cache (null: transformers' own cannot
with these sizes).
What is tried, and on which sizes, is in tests/small_any.py. Fp32 on the CPU; three minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from small_any import FAMILIES, REFUSED, UNBUILT, compare, generation_error, make

from longctx.errors import UserError, one_line, say
from profiling.results import results_file, write_results


def row(family: str) -> dict[str, Any]:
    """Returns the row of a family."""
    try:
        if family in UNBUILT:
            make(family)
        found = compare(family)
    except UserError as error:
        assert family in REFUSED, family
        return dict(family=family, outcome="refused", reason=one_line(error, 160))
    except Exception as error:  # whatever transformers raises for sizes that do not fit together
        assert family in UNBUILT, family
        return dict(family=family, outcome="not built", reason=one_line(error, 160))
    equal, found["generation_error"] = found.pop("equal"), generation_error(family)
    return dict(family=family, outcome="equal" if equal else "differs") | found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=results_file, required=True, help="JSON file to write")
    args = parser.parse_args()
    rows = [row(family) for family in FAMILIES]
    counts = dict(Counter(found["outcome"] for found in rows))
    counts["our loss"] = sum(found.get("loss_is_ours") is not None for found in rows)
    counts["our attention"] = sum(found.get("attention_is_ours", False) for found in rows)
    write_results(args.output, rows, extra={"counts": counts})
    say(", ".join(f"{name}: {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
