"""Groups stay whole: in one row, once, each answer behind its prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_groups import PAD, make_groups, packed, some_groups

from longctx.attention.documents import Documents
from longctx.constants import IGNORE_INDEX
from longctx.errors import UserError
from longctx.train.data.pack.packing_groups import (
    GROUP_ROW_FEATURES,
    build_group_row,
    check_groups,
    cut_group,
    with_mismatched,
)
from longctx.train.data.reading.groups import AnswerGroup, columns_of, group_of

NAN = float("nan")


def parts_of(row) -> list[np.ndarray]:
    return np.split(row["input_ids"], np.cumsum(row["lengths"])[:-1])


def groups_of(row) -> list[list[list[int]]]:
    """The tokens of each group's prompt and answers."""
    found: dict[int, list[list[int]]] = {}
    documents = zip(parts_of(row), row["parents"], row["sides"], strict=True)
    for number, (ids, parent, side) in enumerate(documents):
        assert (parent >= 0) == (side >= 0)
        if parent >= 0:
            found[parent].append(ids.tolist())
        elif ids[0] != PAD:
            found[number] = [ids.tolist()]
    return list(found.values())


def test_the_worked_example():
    first, second = make_groups([[3, 2, 1], [2, 3]])
    row = build_group_row([replace(first, record=4), replace(second, record=9)], 12, PAD)
    x = IGNORE_INDEX
    expected = {
        "input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0],
        "labels": [x, x, x, 4, 5, 6, x, x, 9, 10, 11, x],
        "position_ids": [0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 4, 0],
        "lengths": [3, 2, 1, 2, 3, 1],
        "parents": [-1, 0, 0, -1, 3, -1],
        "sides": [-1, 0, 1, -1, 0, -1],
        "documents": [4, 9],
    }
    assert {name: row[name].tolist() for name in expected} == expected
    np.testing.assert_equal(row["margins"], np.array([NAN, 0.5], np.float32))
    assert row.keys() == GROUP_ROW_FEATURES.keys()


@settings(max_examples=100, deadline=None)
@given(groups=some_groups(), spare=st.integers(0, 60), open_rows=st.integers(1, 6))
def test_every_group_is_in_one_row_as_it_is(groups, spare, open_rows):
    seq_len = max(map(len, groups)) + spare
    rows, stats = packed(groups, seq_len, open_rows=open_rows)
    seen = sorted(group for row in rows for group in groups_of(row))
    expected = [[ids.tolist() for ids in (g.prompt, *g.answers)] for g in groups]
    assert seen == sorted(expected)
    assert stats.groups == len(groups) and stats.rows == len(rows)
    assert stats.tokens == sum(map(len, groups)) == len(rows) * seq_len - stats.padding_tokens
    assert stats.separate_tokens == sum(
        len(g.prompt) + len(answer) for g in groups for answer in g.answers
    )


@settings(max_examples=100, deadline=None)
@given(groups=some_groups(), spare=st.integers(0, 60))
def test_a_row_describes_its_documents(groups, spare):
    """Its positions and parents are those of attention, and labels are the answers' tokens."""
    seq_len = max(map(len, groups)) + spare
    rows, _ = packed(groups, seq_len)
    for row in rows:
        assert sum(row["lengths"]) == seq_len and min(row["lengths"]) > 0
        documents = Documents.of(row["lengths"].tolist(), row["parents"].tolist())
        assert documents.position_ids().tolist() == row["position_ids"].tolist()
        answered = np.repeat(row["sides"] >= 0, row["lengths"])
        expected = np.where(answered, row["input_ids"], IGNORE_INDEX)
        assert row["labels"].tolist() == expected.tolist()
        records = [groups[n] for n in row["documents"]]
        prompts = [ids[0] for ids in groups_of(row)]
        assert prompts == [group.prompt.tolist() for group in records]
        sides = [side for group in records for side in group.sides]
        assert [side for side in row["sides"] if side >= 0] == sides
        margins = [NAN if group.margin is None else group.margin for group in records]
        np.testing.assert_equal(row["margins"], np.array(margins, np.float32))


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    seq_len=st.integers(1, 100),
    long_documents=st.sampled_from(["truncate", "truncate_start"]),
)
def test_a_group_is_cut_no_more_than_it_must_be(lengths, seq_len, long_documents):
    (group,) = make_groups([lengths])
    if len(group) <= seq_len:
        return
    found = cut_group(group, seq_len, long_documents)
    prompt, *answers = lengths
    if long_documents == "truncate_start":
        room = seq_len - sum(answers)
        if room < 1:
            assert found is None
        else:
            assert found is not None and found.prompt.tolist() == group.prompt[-room:].tolist()
            assert [len(a) for a in found.answers] == answers
        return
    limits = [L for L in range(1, 31) if prompt + sum(min(n, L) for n in answers) <= seq_len]
    if not limits:
        assert found is None
    else:
        assert found is not None and found.prompt is group.prompt
        kept = [a[: max(limits)].tolist() for a in group.answers]
        assert [a.tolist() for a in found.answers] == kept


def test_split_refuses_and_names_the_longest_record():
    groups = make_groups([[2, 3, 4], [9, 9, 9], [9, 9, 10]])
    message = (
        r"^record 2: prompt and answers take 28 tokens, more than --seq_len 20 \(1 others are too "
        r"long as well\): raise --seq_len, or cut .* truncate or .* truncate_start$"
    )
    with pytest.raises(UserError, match=message):
        packed(groups, 20, long_documents="split")


def test_what_does_not_fit_when_it_is_cut_is_counted():
    groups = make_groups([[2, 3, 4], [30, 1, 1], [5, 30, 40]])
    rows, stats = packed(groups, 20)
    assert (stats.groups, stats.too_long, stats.truncated) == (2, 1, 1)
    assert stats.truncated_tokens == 75 - 5 - 2 * 7
    assert "; left out: 1 too long; " in stats.summary(20)
    rows, stats = packed(groups, 20, long_documents="truncate_start")
    assert (stats.groups, stats.too_long, stats.truncated_tokens) == (2, 1, 32 - 20)


def test_equal_answers_are_left_out_and_counted():
    groups = make_groups([[2, 3, 3], [2, 3, 3], [2, 5, 6]])
    groups[1] = replace(groups[1], answers=(groups[1].answers[0],) * 2)
    same_start = np.concatenate([groups[2].answers[0], [99]])
    groups[2] = replace(groups[2], answers=(groups[2].answers[0], same_start))
    _, stats = packed(groups, 20)
    assert (stats.groups, stats.equal) == (2, 1)
    _, stats = packed(groups, 12)  # cutting makes those of the third equal
    assert (stats.groups, stats.equal, stats.truncated) == (1, 2, 0)
    with pytest.raises(UserError, match="in data: 1 record with equal answers, and 0 that"):
        _, stats = packed(groups[1:2], 20)
        check_groups(stats, "data")


def test_groups_without_answers_are_skipped():
    empty = AnswerGroup(np.empty(0, np.int32), (), ())
    rows, stats = packed([empty, *make_groups([[1, 2]]), empty], 5)
    assert stats.groups == len(rows) == 1


@settings(max_examples=50, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=3), min_size=2))
def test_mismatched_answers_are_those_of_the_next_group(shapes):
    groups = make_groups(shapes)
    found = list(with_mismatched(iter(groups)))
    assert [g.record for g in found] == [g.record for g in groups]
    for i, (before, after) in enumerate(zip(groups, found, strict=True)):
        n, others = len(before.answers), groups[(i + 1) % len(groups)].answers
        assert after.sides == (*before.sides, *[2] * n)
        assert after.answers[:n] == before.answers
        for k, answer in enumerate(after.answers[n:]):
            assert answer is others[k % len(others)]


def test_a_single_group_has_no_mismatched_answer():
    with pytest.raises(UserError, match="--task kto needs at least two records"):
        list(with_mismatched(make_groups([[1, 2]])))
    assert list(with_mismatched([])) == []
    equal = make_groups([[1, 2, 2], [1, 2, 2]])
    equal[0] = replace(equal[0], answers=(equal[0].answers[0],) * 2)
    with pytest.raises(UserError, match="at least two"):  # one of the two is left out
        packed(equal, 20, mismatched=True)


def test_mismatched_answers_are_packed_and_counted_once():
    rows, stats = packed(make_groups([[3, 2], [4, 1]]), 12, mismatched=True)
    assert [row["lengths"].tolist() for row in rows] == [[4, 1, 2, 5], [3, 2, 1, 6]]
    assert (stats.groups, stats.answers, stats.answer_tokens) == (2, 2, 6)
    stats.kind = "rated"
    summary = (
        "2 prompts with 2 answers, 2 of them desirable, 13 tokens (20 without sharing prompts, 35"
    )
    assert stats.summary(12).startswith(summary)


def test_groups_are_kept_in_columns():
    for group in make_groups([[3, 2, 1], [1, 4]]):
        columns = columns_of(group)
        images = columns.pop("pictures")  # as files of tokens call them
        found = group_of(**columns, images=images, record=group.record)
        columns["pictures"] = images
        assert columns_of(found).keys() == columns.keys()
        assert found.prompt.tolist() == group.prompt.tolist()
        assert [a.tolist() for a in found.answers] == [a.tolist() for a in group.answers]
        assert (found.sides, found.margin) == (group.sides, group.margin)
        assert found.record == group.record
