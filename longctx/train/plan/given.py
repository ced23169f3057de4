"""A plan as a file: `longctx plan --json` writes it, `train.py --plan` runs it.

The file's part `plan` holds what the run must be (`run`: options by name; `model`: dimensions) and
what was decided: budgets in bytes, what each layer keeps and where, how the work is cut, and the
places of each block. The run calls decide.py with these budgets, this ladder and this cut, and
checks that the same places come out.

`images` are those that each row was planned with. A run that checks a plan has not read its rows:
once it has, it leaves room for their images, and a line says if these are more than planned.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from longctx.cost.kept import Keep, Ladder, in_order
from longctx.cost.sizes import Batch, Cut, Sizes
from longctx.cost.table import INPUT
from longctx.errors import UserError
from longctx.memory.ladder import Budget, Step
from longctx.memory.place import KINDS, Place
from longctx.memory.states import BlockSpec
from longctx.runtime.costs import StepTable
from longctx.train.options.recipe import read_text
from longctx.train.plan.predict import Plan, Run

FORMAT, OF_ONE_KIND = 4, 3
"""The version that is written, and the last one whose layers were all of one kind."""
OPTIONS = (
    *("class_type", "seq_len", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("place", "gpu_memory_gib", "keep", "offload_activations", "head_groups", "tile_tokens"),
    *("parts", "lora_r", "lora_targets", "lora_modules_to_save", "use_dora", "quantize", "task"),
    "train_vision",
)
"""Of a run, which a plan is for."""
DIMENSIONS = ("layers", "hidden", "vocab")
OF_KIND = ("intermediate", "heads", "kv_heads", "head_dim")
"""The dimensions of a kind of layers that plans of any version have."""
NAMED = (*OF_KIND, "window")
"""Those that are written."""


class PlannedImages(NamedTuple):
    """The images of each row, all of one size."""

    in_a_row: int
    width: int
    """Pixels as they reach the tower."""
    height: int
    features: int
    """Tokens that stand for parts of an image."""

    @property
    def tokens(self) -> int:
        """Tokens of a row that stand for parts of images."""
        return self.in_a_row * self.features


@dataclass(frozen=True, kw_only=True)
class Given:
    """A plan that was read from a file."""

    path: Path
    run: dict[str, Any]
    model: dict[str, int]
    kinds: list[dict[str, Any]]
    """The dimensions of each kind of layers."""
    of_layer: list[int]
    budget: Budget
    ladder: Ladder
    cut: Cut
    places: list[Place]
    graphs: bool
    """Whether layers run as CUDA graphs, where the run may have them."""
    images: PlannedImages | None = None
    """None where rows were planned with text alone."""
    tower_on_gpu: bool = True
    """Whether the weights of the vision tower, where it is frozen, stay on the GPU."""

    def step(self, step: Step) -> Step:
        """Returns the step with the plan's choice, whatever is free here."""
        given = self.ladder, replace(step.sizes, **self.cut._asdict())
        return replace(step, given=given, graphs=step.graphs and self.graphs)

    def check(self, run: Run, sizes: Sizes) -> None:
        """Raises UserError if the plan is of another run."""
        for name, planned in self.run.items():
            if (asked := run.value(name)) != planned:
                raise UserError(
                    f"--plan {self.path} is of a run with {_flag(name, planned)}, and this one has "
                    f"{_flag(name, asked)}: plan again, or run what was planned"
                )
        self._check_model(sizes)
        if len(self.ladder) != sizes.layers:
            raise UserError(f"--plan {self.path} keeps {len(self.ladder)} of {sizes.layers} layers")
        layers = StepTable.of(sizes, Batch(1, 1)).layers
        for i, (keep, layer) in enumerate(zip(self.ladder, layers, strict=True)):
            must = layer.always - {INPUT} if i else layer.always
            if wrong := (keep.kept - layer.by_name.keys()) | (must - keep.kept):
                raise UserError(
                    f"--plan {self.path} keeps other activations than layers of this model can or "
                    f"must ({', '.join(in_order(wrong))}): plan again"
                )

    def _check_model(self, sizes: Sizes) -> None:
        def compare(planned: dict[str, Any], model: object, where: str = "") -> None:
            for name, value in planned.items():
                if (found := getattr(model, name)) != value:
                    raise UserError(
                        f"--plan {self.path} is of a model with {name} {value}{where}, and this "
                        f"one's is {found}: plan again, with this model"
                    )

        compare(self.model, sizes)
        of_layer = self.of_layer or sizes.layers * [0]
        for i, (planned, kind) in enumerate(zip(of_layer, sizes.of_layer, strict=True)):
            compare(self.kinds[planned], sizes.kinds[kind], f" in layer {i}")

    def fewer_images(self, most: int) -> str | None:
        """Returns a line if a row has more tokens of images, up to `most`, than it was planned
        with."""
        planned = self.images
        if most <= (planned.tokens if planned else 0):
            return None
        of = "no images"
        if planned:
            size = f"{planned.width} x {planned.height}"
            of = f"{planned.in_a_row} images of {size}, {planned.tokens} tokens,"
        return (
            f"--plan {self.path} is of rows with {of} and one here has {most} tokens of images: "
            "what these take must be free beside the plan; more --images would plan for them"
        )

    def places_of(self, specs: Sequence[BlockSpec]) -> list[Place]:
        """Returns the place of each block. Raises UserError if the model has other blocks than the
        plan places, or if something that the plan places on the host cannot wait there."""
        others = iter(self.places)
        of_tower = Place(weight=self.tower_on_gpu)
        found = [of_tower if spec.tower else next(others, None) for spec in specs]
        places = [place for place in found if place is not None]
        whole = len(places) == len(specs) and next(others, None) is None
        if not whole or not all(map(_may_be, specs, places)):
            raise UserError(
                f"--plan {self.path} places blocks as this version of longctx does not: plan again"
            )
        return places


def _may_be(spec: BlockSpec, place: Place) -> bool:
    return place.all_on_gpu or (bool(spec.modules) and (place.weight or spec.movable))


def _flag(name: str, value: Any) -> str:
    return f"no --{name}" if value is None else f"--{name} {value}"


def written(planned: Plan) -> dict[str, Any]:
    """Returns a plan as JSON values."""
    decision, sizes = planned.decision, planned.sizes
    placed = [*zip(decision.specs, decision.places, strict=True)]
    return {
        "format": FORMAT,
        "run": {name: planned.run.value(name) for name in OPTIONS},
        "model": {name: getattr(sizes, name) for name in DIMENSIONS},
        "kinds": [{name: getattr(kind, name) for name in NAMED} for kind in sizes.kinds],
        "kind_of_layer": list(sizes.of_layer),
        "budget_bytes": list(decision.budget),
        "layers": [[in_order(keep.kept), in_order(keep.hosted)] for keep in decision.kept.ladder],
        "cut": list(sizes.cut(planned.run.tokens)),
        "images": _images_of(planned.run),
        "cuda_graphs": decision.chosen.graph_bytes > 0,
        "blocks_on_gpu": [
            [kind for kind in KINDS if getattr(p, kind)] for spec, p in placed if not spec.tower
        ],
        "tower_on_gpu": all(place.weight for spec, place in placed if spec.tower),
    }


def _images_of(run: Run) -> dict[str, int] | None:
    if run.image is None:
        return None
    image = run.image
    return PlannedImages(run.images, image.width, image.height, image.features)._asdict()


def read_given(path: str | Path) -> Given:
    """Reads a plan. Raises UserError for a file that is none."""
    path = Path(path)
    try:
        found = json.loads(read_text("plan", path))
        if not found["fits"]:
            raise UserError(f"--plan {path} does not fit its machine: {found['problem']}")
        if "plan" not in found:
            raise UserError(
                f"--plan {path} is of a run with torch's AdamW, whose states nobody places: leave "
                "out --optimizer_states as_weights"
            )
        plan = found["plan"]
        if plan["format"] not in (FORMAT, OF_ONE_KIND):
            raise UserError(f"--plan {path} was written by another version: plan again")
        gpu, host = plan["budget_bytes"]
        earlier = {"parts": None, "train_vision": False}
        earlier |= {"use_dora": False} if plan["format"] == OF_ONE_KIND else {}
        run = earlier | plan["run"]
        kinds, of_layer = _kinds(plan)
        return Given(
            path=path,
            run={name: run[name] for name in OPTIONS},
            model={name: int(plan["model"][name]) for name in DIMENSIONS},
            kinds=kinds,
            of_layer=of_layer,
            budget=Budget(_whole(gpu), _whole(host)),
            ladder=_ladder(plan["layers"]),
            cut=Cut(*(_whole(number, 1) for number in plan["cut"])),
            places=[Place(**{kind: kind in on_gpu for kind in KINDS}) for on_gpu in _lists(plan)],
            graphs=plan.get("cuda_graphs") is True,  # files of earlier versions do not say
            images=_images(plan.get("images")),  # nor do these
            tower_on_gpu=plan.get("tower_on_gpu") is not False,  # nor of this
        )
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"--plan {path} is no plan: write one with longctx plan --json") from error


def _whole(number: Any, least: int = 0) -> int:
    """Returns the number if it is an integer of at least `least`; else raises ValueError."""
    if type(number) is not int or not least <= number < 2**63:
        raise ValueError(number)
    return number


def _images(found: dict[str, Any] | None) -> PlannedImages | None:
    if found is None:
        return None
    return PlannedImages(*(_whole(found[name], 1) for name in PlannedImages._fields))


def _kinds(plan: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the dimensions of each kind of layers, and the kind of each layer: no numbers if all
    are of the first kind."""
    if plan["format"] == OF_ONE_KIND:
        return [{name: plan["model"][name] for name in OF_KIND}], []
    kinds = [{name: kind[name] for name in NAMED} for kind in plan["kinds"]]
    of_layer = [_whole(kind) for kind in plan["kind_of_layer"]]
    if len(of_layer) != plan["model"]["layers"] or max(of_layer) >= len(kinds):
        raise ValueError(of_layer)
    return kinds, of_layer


def _ladder(layers: Sequence[tuple[list[str], list[str]]]) -> Ladder:
    ladder = tuple(Keep(frozenset(kept), frozenset(hosted)) for kept, hosted in layers)
    for kept, hosted in ladder:
        if not hosted <= kept:
            raise ValueError(kept, hosted)  # what is not kept waits nowhere
    return ladder


def _lists(plan: dict[str, Any]) -> list[list[str]]:
    lists: list[list[str]] = plan["blocks_on_gpu"]
    if not all(isinstance(names, list) and set(names) <= {*KINDS} for names in lists):
        raise ValueError(lists)
    return lists
