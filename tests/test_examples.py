"""The examples in the docstrings of the public names run, and print what they say."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect

import pytest

import longctx


@pytest.fixture(scope="module", autouse=True)
def deepspeed_has_spoken() -> None:
    """transformers imports DeepSpeed when it first saves a model, which prints a line to stdout."""
    with contextlib.suppress(ImportError):
        importlib.import_module("deepspeed")


def examples(name: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(getattr(longctx, name)) or "")


@pytest.mark.usefixtures("reference_kernels")
@pytest.mark.parametrize("name", longctx.__all__)
def test_the_example_of_a_public_name_runs(name: str) -> None:
    found = examples(name)
    assert found and any(example.want for example in found), "an example shows a result"
    test = doctest.DocTest(found, {}, name, None, None, None)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=report.append)
    assert not runner.summarize(verbose=False).failed, "".join(report)


def test_a_wrong_result_is_found() -> None:
    wrong = doctest.DocTestParser().get_examples(">>> 1 + 1\n3\n")
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTest(wrong, {}, "wrong", None, None, None), out=lambda text: None)
    assert runner.failures == 1
