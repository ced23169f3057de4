"""The fitted numbers of the cost model are those that the committed results give."""

from __future__ import annotations

import pytest

from longctx.cost import fitted
from profiling import fit_rates
from profiling.fit_rates import FITS, UNFITTED, Fit


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.name)
def test_results_give_the_number_again(fit: Fit) -> None:
    if fit.name == "GAPS":
        pytest.importorskip("peft")
    assert fit.again() == pytest.approx(fit.today, rel=fit.tolerance)


def test_every_number_is_fitted_or_said_to_be_chosen() -> None:
    numbers = {name for name in vars(fitted) if name.isupper()} - {"GIB"}
    shown = {fit.name.split(",")[0].split("[")[0] for fit in FITS} | UNFITTED.keys()
    assert numbers == shown


def test_the_script_prints_a_line_for_each(monkeypatch, capsys) -> None:
    few = [fit for fit in FITS if fit.name.endswith("UPDATE_BYTES")]
    monkeypatch.setattr(fit_rates, "FITS", few)
    monkeypatch.setattr("sys.argv", ["fit_rates.py"])
    fit_rates.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(few) + len(UNFITTED)
    assert lines[0].split() == [
        *("ENGINE_UPDATE_BYTES", "68", "today", "69.014", "fitted", "+1.5%", "h200_step"),
    ]
