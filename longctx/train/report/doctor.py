"""What this machine has, how fast it is, and what is missing for speed, each with what to do.

    longctx doctor
    longctx doctor --again          measures once more: another process had the GPU

On a GPU the rates are measured in about ten seconds and kept for `longctx plan` and for runs
(longctx/train/plan/measure.py); where the card is known its profile is shown, too. Works without a
GPU too.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longctx.attention import flash4
from longctx.constants import GIB
from longctx.errors import UserError, printable
from longctx.memory.machine import available_host_bytes
from longctx.memory.rates import driver_version, rates_path, read_rates
from longctx.packages import namesakes, requirements
from longctx.system import expanded, version_of
from longctx.train.options.config import DataArguments, TrainArguments
from longctx.train.plan.measure import Gpu, gpu_here, this_machine
from longctx.train.program import Parser
from longctx.train.report.missing import Facts, Rate, Unfit, missing, rates

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="longctx doctor",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--again", action="store_true", help="measure again, although rates are kept"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--output_dir", default=TrainArguments.output_dir, help="where runs write: %(default)s"
    )
    parser.add_argument(
        "--cache_dir", default=DataArguments.cache_dir, help="where rows are kept: %(default)s"
    )
    args = parser.parse_args(argv)
    folders = {"output": Path(args.output_dir), "cache": expanded(args.cache_dir)}
    facts = examine(folders, again=args.again)
    result = as_json(facts)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


# --- what is here ----------------------------------------------------------------------------


def examine(folders: dict[str, Path], *, again: bool = False) -> Facts:
    gpu = gpu_here()
    measured = unmeasured = kept_in = None
    if gpu is not None:
        try:
            this_machine(again=again)
            measured, kept_in = read_rates(gpu.device), rates_path(gpu.device)
        except UserError as error:
            unmeasured = str(error)
        if measured is None and unmeasured is None:
            unmeasured = "measuring failed, or its result could not be kept"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Facts(
        gpu=gpu,
        has_card=gpu is not None
        or bool(shutil.which("nvidia-smi"))
        or driver_version() is not None,
        driver=driver_version(),
        driver_cuda=_driver_cuda(),
        torch_cuda=torch.version.cuda,
        fa4=_fa4(gpu),
        allocator=",".join(os.environ.get(name, "") for name in ALLOCATOR),
        measured=measured,
        unmeasured=unmeasured,
        kept_in=kept_in,
        host_bytes=psutil.virtual_memory().total,
        host_free_bytes=psutil.virtual_memory().available,
        allowed_bytes=available_host_bytes(),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        shm_bytes=_total(Path("/dev/shm")),
        folders={what: (path, *_free(path)) for what, path in folders.items()},
        unfit=unfit_packages(),
        namesakes=namesakes(),
    )


def _fa4(gpu: Gpu | None) -> str | None:
    """Returns why flash-attn-4 cannot run; None if it can, or if `auto` takes another backend
    anyway."""
    if gpu is None or torch.cuda.get_device_capability(gpu.device)[0] not in flash4.CHOSEN:
        return None
    return flash4.why_not(gpu.device)


def _driver_cuda() -> tuple[int, int] | None:
    """Returns the newest CUDA that the driver knows: 13000 is 13.0."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    number = ask() if ask else 0
    return (number // 1000, number % 1000 // 10) if number else None


def _total(folder: Path) -> int | None:
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def _free(folder: Path) -> tuple[int, bool]:
    """Returns the free bytes of the disk, and whether `folder` is there or can be made and may be
    written, by the nearest folder above that exists."""
    above = [folder, *folder.parents]
    at = next(i for i, path in enumerate(above) if os.path.isdir(path))  # False for odd names
    here = above[at]
    makes = os.access(here, os.W_OK | os.X_OK)
    if at:
        makes = makes and not os.path.lexists(above[at - 1]) and _can_be_named(folder)
    return shutil.disk_usage(here).free, makes


def _can_be_named(path: Path) -> bool:
    """Whether nothing but its absence keeps a path from being there: it is not too long, and no
    file or circle of links is in its way."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def unfit_packages() -> list[Unfit]:
    """Packages that runs use, optional ones where they are installed, in a version that longctx
    does not take."""
    found = ((version_of(line.name), line) for line in requirements())
    unfit = [
        Unfit(line.name, version, str(line.specifier))
        for version, line in found
        if version and not line.specifier.contains(version, prereleases=True)
    ]
    return list(dict.fromkeys(unfit))


# --- to read ---------------------------------------------------------------------------------


def as_json(facts: Facts) -> dict[str, Any]:
    gpu, profile = facts.gpu, facts.profile
    return {
        "gpu": gpu
        and {
            "name": gpu.name,
            "gib": round(gpu.total_bytes / GIB, 2),
            "free_gib": round(gpu.free_bytes / GIB, 2),
            "profile": profile.name if profile else None,
        },
        "host": {
            "gib": round(facts.host_bytes / GIB, 2),
            "free_gib": round(facts.host_free_bytes / GIB, 2),
            "allowed_gib": round(facts.allowed_bytes / GIB, 2),
            "cores": os.cpu_count(),
        },
        "versions": {
            "driver": facts.driver,
            "cuda of the driver": facts.driver_cuda and "{}.{}".format(*facts.driver_cuda),
            "cuda of torch": facts.torch_cuda,
            **{name: version_of(name) for name in ("torch", "triton", "transformers")},
            "flash-attn-4": version_of("flash-attn-4"),
            "python": sys.version.split()[0],
        },
        "folders": {
            what: {"path": str(path), "free_gib": round(free_bytes / GIB, 2)}
            for what, (path, free_bytes, _) in facts.folders.items()
        },
        "rates": [rate._asdict() for rate in rates(facts)],
        "measured": facts.measured and asdict(facts.measured),
        "kept_in": facts.kept_in and str(facts.kept_in),
        "missing": [line._asdict() for line in missing(facts)],
    }


def show(result: dict[str, Any]) -> None:
    console = Console()
    console.print(_machine(result))
    if result["rates"]:
        console.print(_rates(result))
    if not result["missing"]:
        print("nothing is missing for speed")
    for line in result["missing"]:
        print(printable(f"{line['what']}: {line['found']}"))
        print(printable(f"    {line['do']}"))


def _machine(result: dict[str, Any]) -> Table:
    gpu, host = result["gpu"], result["host"]
    table = Table(title="This machine", show_header=False)
    described = "none that torch can use"
    if gpu:
        known = f", known as {gpu['profile']}" if gpu["profile"] else ", without a profile"
        described = f"{gpu['name']}{known}: {gpu['free_gib']:.1f} of {gpu['gib']:.1f} GiB free"
    table.add_row("GPU", escape(described))
    free = f"{host['allowed_gib']:.1f} of {host['gib']:.1f} GiB may be taken"
    table.add_row("host", f"{host['cores']} cores, {free}")
    versions = [f"{name} {found}" for name, found in result["versions"].items() if found]
    table.add_row("versions", escape(printable(", ".join(versions))))
    for what, folder in result["folders"].items():
        line = f"{folder['path']}: {folder['free_gib']:.1f} GiB free"
        table.add_row(what, escape(printable(line)))
    return table


def _rates(result: dict[str, Any]) -> Table:
    title = f"Rates, kept in {result['kept_in']}"
    table = Table("", "measured", "profile", "", title=escape(printable(title)))
    for rate in map(lambda row: Rate(**row), result["rates"]):
        expected = "" if rate.profile is None else _number(rate.profile)
        share = "" if rate.share is None else f"{rate.share:.0%}"
        table.add_row(rate.what, f"{_number(rate.measured)} {rate.unit}", expected, share)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
