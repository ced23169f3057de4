"""The tables of launches for many tensors. That kernels find what they need there is tested with
each of them."""

from __future__ import annotations

import numpy as np
import torch

from longctx.kernels.many import FIRST, NUMEL, ROW, are_aligned, launches


def table_of(*numels: int) -> np.ndarray:
    table = np.zeros((len(numels), ROW), np.int64)
    table[:, NUMEL], table[:, -1] = numels, range(len(numels))
    return table


def test_each_kind_has_the_programs_of_its_tensors() -> None:
    """From its own first one on; tensors without elements have none."""
    table, kinds = table_of(10, 1, 11, 0, 30), np.array([7, 2, 7, 7, 7])
    found = {}
    for kind, rows, programs in launches(table, kinds, 10, torch.device("cpu")):
        found[kind] = rows[:, [-1, FIRST]].tolist(), programs
    assert found == {2: ([[1, 0]], 1), 7: ([[0, 0], [2, 1], [4, 3]], 6)}


def test_nothing_is_no_launch() -> None:
    for table in (table_of(), table_of(0, 0)):
        kinds = np.zeros(len(table), np.int64)
        assert [*launches(table, kinds, 10, torch.device("cpu"))] == []


def test_all_words_are_aligned_or_none_is_loaded_so() -> None:
    words = np.array([[16, 0, 4096], [16, 8, 4096], [15, 32, 48]])
    assert are_aligned(words).tolist() == [True, False, False]
