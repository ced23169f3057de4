"""docs/first_ten_minutes.md is what a newcomer does: its script trains, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT


@pytest.mark.usefixtures("reference_kernels")
def test_the_script_of_the_page_trains(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheduled: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs/first_ten_minutes.md").read_text()
    script = next(iter(re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)))
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script.replace("rows[:10]", "rows[:4]"), "first.py", "exec"), found)
    layers = found["config"].num_hidden_layers
    assert scheduled == [found["length"]] * 4 * layers
    assert 5.2 < found["losses"][0] < 5.8  # the page says about 5.5
    assert found["losses"][-1] < found["losses"][0] - 0.1
    said = capsys.readouterr().out
    assert "longctx patched: " in said and "LlamaForCausalLM saved and loaded" in said
    assert (tmp_path / "first_model/model.safetensors").is_file()
