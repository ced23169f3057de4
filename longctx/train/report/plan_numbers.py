"""A plan as JSON values: `longctx plan --json`, and what its text and its page are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longctx.constants import GIB
from longctx.cost.images import Images
from longctx.cost.kept import describe
from longctx.cost.machines import Machine
from longctx.cost.peak import Phase, peak
from longctx.loop.states import describe_states
from longctx.train.plan.changes import Change
from longctx.train.plan.predict import Plan
from longctx.train.plan.shortage import Shortage, held_on_host
from longctx.train.plan.subject import DTYPE
from longctx.train.plan.written_plan import plan_as_json

DAY = 24 * 60 * 60


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, and what was asked besides."""

    plan: Plan
    host_bytes: int
    """Free on the host."""
    shortage: Shortage | None = None
    changes: Sequence[Change] = ()
    sweep: Sequence[Plan] = ()
    less_memory: Sequence[Plan] = ()
    """Plans of this run for smaller values of --gpu_memory_gib."""
    data_tokens: int | None = None


def as_json(answer: Answer) -> dict[str, Any]:
    """Returns the figures of a plan; of one that does not fit, those with the memory that lacks."""
    lacks, fits = answer.shortage, answer.plan.fits
    planned = lacks.plan if lacks else answer.plan
    run, decision = planned.run, planned.decision
    model, machine, engine = run.model, planned.machine, run.engine
    most = peak(planned.phases)
    result = {
        "model": model.preset or model.model_name_or_path,
        "class_type": model.class_type,
        "parts": model.parts,
        "gpu": machine.name,
        "gpus": run.gpus,
        "sequence_parallel_size": run.sequence_parallel_size,
        "engine": engine.name if engine else None,
        "rates": _rates(machine),
        "assumed": machine.assumed or None,
        "attn_backend": planned.backend,
        "layers": _layers(planned),
        "unknown": planned.unknown,
        "rows": run.per_device_train_batch_size,
        "passes": run.gradient_accumulation_steps,
        **_short(planned),
        "fits": fits,
        "problem": lacks.line if lacks else planned.problem,
        "shortage": _shortage(lacks),
        "gpu_limit_gib": _gib(planned.gpu_limit),
        "host_locked_gib": _gib(run.gpus * decision.host.nbytes),
        "host_reading_gib": _gib(run.gpus * planned.reading_bytes),
        "host_limit_gib": _gib(run.gpus * answer.plan.decision.budget.host),
        "host_free_gib": _gib(answer.host_bytes),
        "peak": {"phase": most.name, "groups": _gibs(most.groups)},
        "host_holds": _gibs(held_on_host(planned)),
        "states": _states(planned),
        "kept": _kept(planned),
        "graphs_gib": _gib(decision.chosen.graph_bytes),
        "no_graphs": decision.chosen.no_graphs,
        "phases": [*map(_phase, planned.phases)],
    }
    if planned.unknown is None:
        seconds = {name: round(s, 4) for name, s in planned.seconds._asdict().items()}
        result |= {"link_s": seconds.pop("link"), "parts_s": seconds}
    if fits and run.exact and engine is None and run.gpus == 1:
        result["plan"] = plan_as_json(planned)
    if planned.images is not None:
        result["images"] = _images(planned, planned.images)
    return result | _days(answer, planned) | _others(answer)


def _days(answer: Answer, planned: Plan) -> dict[str, Any]:
    """Returns how long all data takes; nothing if that is unknown."""
    if not answer.data_tokens or planned.unknown is not None:
        return {}
    days = answer.data_tokens / planned.tokens_per_s / DAY
    low, high = (times * days for times in planned.machine.spread)
    return {
        "data_tokens": answer.data_tokens,
        "days": days,
        "days_low": low,
        "days_high": high,
    }


def _others(answer: Answer) -> dict[str, Any]:
    """Returns the figures of the other plans that were asked for, or that show a way out."""
    result: dict[str, Any] = {}
    if answer.changes:
        result["changes"] = [{"flags": flags, **_short(change)} for flags, change in answer.changes]
    if answer.less_memory:
        result["less_memory"] = [
            {"gpu_memory_gib": other.run.gpu_memory_gib, **_short(other)}
            for other in answer.less_memory
        ]
    if answer.sweep:
        result["sweep"] = [{**_short(other), "kept": _kept(other)} for other in answer.sweep]
    return result


def _phase(phase: Phase) -> dict[str, Any]:
    return {"phase": phase.name, "gib": _gib(phase.nbytes), "buffers": _gibs(phase.buffers)}


def _shortage(lacks: Shortage | None) -> dict[str, Any] | None:
    if lacks is None:
        return None
    return {
        "memory": lacks.memory,
        "needed_gib": _gib(lacks.needed),
        "available_gib": _gib(lacks.available),
        "holds": _gibs(lacks.holds),
    }


def _images(planned: Plan, images: Images) -> dict[str, Any]:
    """Returns the images of each row, and what they take."""
    image = images.image
    return {
        "in_a_row": planned.run.images,
        "width": image.width,
        "height": image.height,
        "patches": image.patches,
        "tokens": image.tokens,
        "row_tokens": planned.run.image_tokens,
        "in_a_group": images.group,
        "trained": images.trained,
        "tflops": round(images.flops / 1e12, 3),
        "pixels_gib": _gib(images.standing["pixels"]),
        "features_gib": _gib(images.forward["features of images"]),
        "tower_gib": _gib(images.tower.parameters * images.tower.itemsize),
        "tower_on_host": images.away,
    }


def _states(planned: Plan) -> str:
    run, parameters = planned.run, planned.parameters
    if run.engine is not None:
        standing = run.engine.standing(parameters)
        standing["gradients"] = run.engine.gradient(parameters, parameters.total)
        shown = ", ".join(f"{name} {_gib(size):.2f}" for name, size in standing.items() if size)
        host = f"; {run.engine.host(parameters) / GIB:.2f} GiB of the host a process"
        return (
            f"states: {run.engine.name}, on each GPU: {shown or 'nothing'} GiB"
            f"{host if run.engine.host(parameters) else ''}"
        )
    if not run.exact:
        return "states: torch's AdamW, in bfloat16, on the GPU"
    return describe_states(planned.decision, DTYPE)


def _layers(planned: Plan) -> str:
    """Returns whether the cost of layers is counted, measured or unknown."""
    if planned.unknown is not None:
        return "unknown"
    return "measured" if planned.sizes.kinds[0].measured else "counted"


def _kept(planned: Plan) -> str:
    if planned.sizes.class_type == "any":
        return describe(planned.decision.kept.ladder)
    if planned.sizes.class_type != "custom":
        return "kept for backward: layers' inputs"
    tokens, ladder = planned.run.tokens, planned.decision.kept.ladder
    return f"{describe(ladder)}; {planned.sizes.cut(tokens).of(tokens, planned.sizes.vocab)}"


def _rates(machine: Machine) -> str:
    measured = "measured here" if machine.here else "measured"
    return measured if machine.measured else "estimated"


def _short(planned: Plan) -> dict[str, Any]:
    """Returns a plan's figures; without seconds if these are unknown."""
    least, most = planned.machine.spread
    found = {
        "seq_len": planned.run.model.seq_len,
        "gpu_gib": _gib(planned.gpu_bytes),
        "host_gib": _gib(planned.host_bytes),
    }
    if planned.unknown is not None:
        return found
    return found | {
        "step_s": round(planned.step_s, 4),
        "step_s_low": round(least * planned.step_s, 4),
        "step_s_high": round(most * planned.step_s, 4),
        "tokens_per_s": round(planned.tokens_per_s, 1),
        "tokens_per_s_low": round(planned.tokens_per_s / most, 1),
        "tokens_per_s_high": round(planned.tokens_per_s / least, 1),
    }


def _gib(nbytes: int) -> float:
    return round(nbytes / GIB, 3)


def _gibs(buffers: dict[str, int]) -> dict[str, float]:
    return {name: _gib(nbytes) for name, nbytes in buffers.items() if nbytes}
