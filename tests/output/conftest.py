"""Runs that a module's tests share take the plain torch references, as they do for users."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from longctx.kernels import launch


@pytest.fixture(scope="module", autouse=True)
def plain_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "INTERPRETED", False)
        yield
