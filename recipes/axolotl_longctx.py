"""A plugin of axolotl that trains its model on longctx's schedule.

    pip install axolotl
    longctx recipes axolotl_longctx.py > axolotl_longctx.py
    axolotl train config.yaml            in this folder, with these lines in config.yaml:

        plugins:
          - axolotl_longctx.LongctxPlugin
        longctx:                         options of longctx.patch; may be left out
          keep: auto

The model is patched when it is built, before adapters and the trainer are put around it. Leave out
other plugins that replace the model's forward: Liger, cut cross-entropy.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import longctx


class LongctxArgs(BaseModel):
    """The part of axolotl's YAML that this plugin reads: `longctx`, options of longctx.patch."""

    longctx: dict[str, Any] | None = None


class LongctxPlugin(BasePlugin):
    def get_input_args(self) -> str:
        return f"{__name__}.LongctxArgs"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        longctx.patch(model, **(cfg.longctx or {}))
