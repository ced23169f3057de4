"""Draws docs/schedule.svg, what exists when in one layer's schedule: python docs/draw_schedule.py

Sizes follow from longctx/layer for Llama-3.1-8B at 131072 tokens: 8 head groups, 16 tiles,
flash-attn-4. One *unit* is T*D numbers of two bytes, 1 GiB there. Bars are as high as what they
stand for; time runs to the right and is not to scale. `--output picture.png` writes another format.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Rectangle

T, D, F, H, K, d = 131072, 4096, 14336, 32, 8, 128
GROUPS, TILES = 8, 16


def units(elements: float, itemsize: int = 2) -> float:
    return elements * itemsize / (T * D * 2)


# --- sizes -----------------------------------------------------------------------------------

x = o = y = units(T * D)
lse = units(H * T, 4)
qkv = units(T * (H + 2 * K) * d / GROUPS)  # of a head group, and as much for dq, dk, dv
do = units(T * H * d / GROUPS)
attention_sums = units(T * (H + 2 * K) * d / GROUPS, 4) + 2 * units(T * H / GROUPS, 4)  # fa4's own
dkv = units(T * 2 * K * d)
tile = units(T * D / TILES)  # n1, h, n2, dn2, dn1
tile_mlp = units(T * F / TILES)  # gate, up, product
tile_qkv = units(T * (H + 2 * K) * d / TILES)
mlp_sums = units(D * (3 * F + H * d), 4)  # gradients of down, gate, up, o
qkv_sums = units(D * (H + 2 * K) * d, 4)
qkv_weight = units(D * (H + 2 * K) * d)

# --- totals ----------------------------------------------------------------------------------
# Each tile and group is a function of its own: what one works with is gone when the next begins.


def total(phase: str) -> tuple[float, float]:
    """The most and the least that is on the GPU in a part of the phase, but weights and finished
    weight gradients."""
    three = x + o + lse + y
    if phase == "attention":
        return x + o + lse + qkv + 2 * tile + qkv_weight / GROUPS, x + o + lse + qkv
    if phase == "mlp":
        made = 2 * tile + 2 * tile_mlp
        return three + made, three + made
    if phase == "1":
        first, last = 2 * tile + 2 * tile_mlp, 4 * tile + 3 * tile_mlp
        return three + max(first, last) + mlp_sums, three + last + mlp_sums
    if phase == "2":
        project = qkv + 2 * tile + qkv_weight / GROUPS
        attend = qkv + do + qkv + attention_sums
        return three + dkv + attend, three + dkv + project
    return three + dkv + qkv_weight + qkv_sums + tile + tile_qkv, three + dkv + qkv_weight + tile


# --- FLOPs, for the shares above the phases -------------------------------------------------------

LINEAR = {"qkv": 2 * T * D * (H + 2 * K) * d, "o": 2 * T * D * H * d, "mlp": 2 * T * D * F}
ATTENTION = 2 * T * T * H * d  # causal: half of 4 T^2 H d
FLOPS = {
    "attention": LINEAR["qkv"] + ATTENTION,
    "mlp": LINEAR["o"] + 3 * LINEAR["mlp"],
    "1": 2 * LINEAR["o"] + 8 * LINEAR["mlp"],  # h, dWo; gate, up again, dproduct, 3 dW, dn2 twice
    "2": LINEAR["qkv"] + LINEAR["o"] + 2.5 * ATTENTION,  # q, k, v again; do
    "3": 2 * LINEAR["qkv"],  # dn1; dWq, dWk, dWv
}

# --- where things are drawn ---------------------------------------------------------------------

PHASES = {  # start, width of a part, parts
    "attention": (0.0, 0.27, GROUPS),
    "mlp": (2.16, 0.13, TILES),
    "1": (5.44, 0.16, TILES),
    "2": (8.0, 0.36, GROUPS),
    "3": (10.88, 0.11, TILES),
}
END = 13.4
HEADINGS = {
    "attention": f"attention\n{GROUPS} head groups",
    "mlp": f"o, MLP\n{TILES} tiles",
    "1": f"1. MLP, o\n{TILES} tiles",
    "2": f"2. attention\n{GROUPS} head groups",
    "3": f"3. q, k, v\n{TILES} tiles",
}
LANES = {  # label, height in units
    "x": ("x", x),
    "o": ("o, then dq", o),
    "y": ("y;  dy, dh, dx", y),
    "dkv": ("dk | dv", dkv),
    "group": ("one head group", qkv + do + qkv + attention_sums),
    "tile": ("one tile", 3 * tile + 3 * tile_mlp),
    "sums": ("weight gradients,\nfp32 sums", mlp_sums),
    "out": ("copies out", 0.36),
    "slab": ("pinned host\nmemory", x + o + lse),
    "in": ("copies in", 0.36),
}
GAP = 0.34

BLUE, LIGHT_BLUE, TEAL, GREEN = "#5b8cc0", "#a9c9e8", "#7fc0b5", "#7fb56b"
YELLOW, ORANGE, RED, PINK = "#f5d76e", "#f0a04b", "#e0706c", "#f3b3b0"
PURPLE, GREY, LIGHT_GREY = "#b59ac9", "#a5a5a5", "#e3e3e3"


class Picture:
    def __init__(self) -> None:
        self.figure, (self.bars, self.sums) = pyplot.subplots(
            2, 1, figsize=(13.5, 10.4), height_ratios=[4, 1], sharex=True, layout="constrained"
        )
        self.base: dict[str, float] = {}
        at = 0.0
        for lane, (_, height) in LANES.items():
            at -= height + GAP
            self.base[lane] = at
        self.bottom = at - 0.1

    def bar(self, lane, start, stop, low, high, colour, label="", edge="white") -> None:
        base = self.base[lane]
        size = (stop - start, high - low)
        self.bars.add_patch(
            Rectangle((start, base + low), *size, facecolor=colour, edgecolor=edge, linewidth=0.4)
        )
        if label:
            self.text((start + stop) / 2, base + (low + high) / 2, label)

    def text(self, at: float, height: float, words: str, **options) -> None:
        style = dict(ha="center", va="center", fontsize=11, color="#222222") | options
        self.bars.text(at, height, words, **style)

    def parts(self, phase: str):
        """(number, start, stop) of each head group or tile."""
        start, width, count = PHASES[phase]
        return [(i, start + i * width, start + (i + 1) * width) for i in range(count)]

    def replaced(self, lane, start, stop, count, height, before, after) -> None:
        """A buffer that turns from one thing into another, part by part, from the top down."""
        width = (stop - start) / count
        self.bar(lane, start, stop, 0, height, before, edge="none")
        for i in range(count):
            done = height * (i + 1) / count
            left = start + (i + 0.5) * width
            self.bar(
                lane, left, stop, height - done, height - done + height / count, after, edge="none"
            )


def draw_lanes(p: Picture) -> None:
    (forward, _, _), (mlp, _, _) = PHASES["attention"], PHASES["mlp"]
    one, two, three = (PHASES[name][0] for name in "123")
    mlp_end, end = mlp + PHASES["mlp"][1] * TILES, three + PHASES["3"][1] * TILES
    loaded = one + 5 * PHASES["1"][1]  # when the last tile of x and o is back
    waits = one - 0.55  # the layer above is in its step 3

    # x, o: kept from forward to backward
    p.bar("x", forward, mlp_end, 0, x, BLUE, "x")
    p.replaced("o", forward, mlp, GROUPS, o, LIGHT_GREY, TEAL)
    p.bar("o", mlp, mlp_end, 0, o, TEAL, "o")
    for lane, colour in (("x", BLUE), ("o", TEAL)):
        p.replaced(lane, waits, loaded, TILES, 1, GREY, colour)
    p.bar("x", loaded, three, 0, x, BLUE, "x")
    p.bar("o", loaded, two, 0, o, TEAL, "o")
    p.replaced("o", two, three, GROUPS, o, TEAL, RED)
    p.text((two + three) / 2 - 0.75, p.base["o"] + 0.25, "o")
    p.text((two + three) / 2 + 0.75, p.base["o"] + 0.75, "dq")
    for lane, colour in (("x", BLUE), ("o", RED)):
        p.replaced(lane, three, end, TILES, 1, colour, GREY)
        p.bar(lane, end, END, 0, 1, GREY, "layer\nbelow")

    # y; dy, dh, dx: the residual stream and its gradient, in one buffer
    p.replaced("y", mlp, mlp_end, TILES, y, LIGHT_GREY, GREEN)
    p.bar("y", mlp_end, mlp_end + 0.35, 0, y, GREEN)
    p.text(mlp_end - 0.45, p.base["y"] + 0.75, "y")
    p.bar("y", waits, one, 0, y, YELLOW)
    p.replaced("y", one, two, TILES, y, YELLOW, ORANGE)
    p.text(one + 0.55, p.base["y"] + 0.28, "dy")
    p.text(two - 0.6, p.base["y"] + 0.72, "dh")
    p.bar("y", two, three, 0, y, ORANGE, "dh")
    p.replaced("y", three, end, TILES, y, ORANGE, YELLOW)
    p.bar("y", end, END, 0, y, YELLOW, "dx")

    # head groups
    p.replaced("dkv", two, three, GROUPS, dkv, LIGHT_GREY, PINK)
    p.bar("dkv", three, end, 0, dkv, PINK, "dk | dv")
    for _, start, stop in p.parts("attention"):
        p.bar("group", start, stop, 0, qkv, LIGHT_BLUE)
    p.text(mlp / 2, p.base["group"] + qkv + 0.2, "q k v of one group")
    for _, start, stop in p.parts("2"):
        level = 0.0
        pieces = ((qkv, LIGHT_BLUE), (do, YELLOW), (qkv, RED), (attention_sums, PURPLE))
        for size, colour in pieces:
            p.bar("group", start, stop, level, level + size, colour)
            level += size
    words = "fa4's fp32 sums\ndq dk dv\ndo\nq k v"
    p.text(two - 0.08, p.base["group"] + 0.44, words, ha="right", fontsize=10)

    # tiles
    p.bar("tile", forward, mlp, 0, tile, LIGHT_BLUE)
    p.text(mlp / 2, p.base["tile"] + tile + 0.2, "n1 of one tile")
    for _, start, stop in p.parts("mlp"):
        p.bar("tile", start, stop, 0, 2 * tile, LIGHT_BLUE)
        p.bar("tile", start, stop, 2 * tile, 2 * tile + 2 * tile_mlp, BLUE)
    p.text((mlp + mlp_end) / 2, p.base["tile"] + 0.78, "h n2 gate up")
    for _, start, stop in p.parts("1"):
        p.bar("tile", start, stop, 0, 2 * tile, LIGHT_BLUE)
        p.bar("tile", start, stop, 2 * tile, 2 * tile + 3 * tile_mlp, BLUE)
        p.bar("tile", start, stop, 2 * tile + 3 * tile_mlp, 3 * tile + 3 * tile_mlp, ORANGE)
    words = "dn2\nproduct\ngate up\nh n2"
    p.text(one - 0.08, p.base["tile"] + 0.45, words, ha="right", fontsize=10)
    p.bar("tile", two, three, 0, tile, LIGHT_BLUE)
    p.text((two + three) / 2, p.base["tile"] + tile + 0.2, "n1 of one tile")
    for _, start, stop in p.parts("3"):
        p.bar("tile", start, stop, 0, tile, LIGHT_BLUE)
        p.bar("tile", start, stop, tile, tile + tile_qkv, RED)
        p.bar("tile", start, stop, tile + tile_qkv, 2 * tile + tile_qkv, ORANGE)
    p.text((three + end) / 2, p.base["tile"] + 0.44, "n1 dq dk dv dn1")

    # weight gradients
    p.bar("sums", one, two, 0, mlp_sums, PURPLE, "down, gate, up, o")
    p.bar("sums", three, end, 0, qkv_sums, PURPLE)
    p.text((three + end) / 2, p.base["sums"] + qkv_sums + 0.2, "q, k, v")

    # copies and the slab
    out_end = mlp + 8 * PHASES["mlp"][1]  # 39 of about 80 ms
    p.bar("out", mlp, out_end, 0, LANES["out"][1], GREY, "x, o")
    p.bar("slab", mlp, loaded, 0, x, BLUE, "this layer's x")
    p.bar("slab", mlp, loaded, x, x + o + lse, TEAL, "this layer's o, lse")
    p.bar("in", waits, loaded, 0, LANES["out"][1], GREY, "x, o by tiles")
    p.bar("in", three + PHASES["3"][1], END, 0, LANES["out"][1], GREY, "the layer below's x, o")


def draw_totals(p: Picture) -> list[tuple[float, str]]:
    axes = p.sums
    peaks = []
    for phase in PHASES:
        at, level = [], []
        for _, start, stop in p.parts(phase):
            high, low = total(phase)
            middle = (start + stop) / 2
            if phase == "2":  # the projections come first and need less
                high, low = low, high
            at += [start, middle, middle, stop]
            level += [high, high, low, low]
        axes.fill_between(at, level, color=LIGHT_BLUE, linewidth=0)
        axes.plot(at, level, color="#33597f", linewidth=0.9)
        peak = max(level)
        peaks.append((peak, phase))
        words = f"peak {peak:.2f}" if phase == "1" else f"{peak:.2f}"
        axes.text((at[0] + at[-1]) / 2, peak + 0.2, words, ha="center", fontsize=11)
    mlp_end = PHASES["mlp"][0] + PHASES["mlp"][1] * TILES
    axes.fill_between([mlp_end, mlp_end + 0.35], [y] * 2, color=LIGHT_BLUE, linewidth=0)
    axes.plot([mlp_end, mlp_end + 0.35], [y] * 2, color="#33597f", linewidth=0.9)
    axes.set_ylim(0, 6.2)
    axes.set_ylabel("units on the GPU", fontsize=11)
    axes.set_xlabel("time (not to scale)", fontsize=11)
    return peaks


def draw(path: Path) -> None:
    p = Picture()
    draw_lanes(p)
    peaks = draw_totals(p)
    mlp_end = PHASES["mlp"][0] + PHASES["mlp"][1] * TILES
    for lane, (label, height) in LANES.items():
        p.text(-0.12, p.base[lane] + height / 2, label, ha="right", fontsize=11.5)
    whole = sum(FLOPS.values())
    for phase, (start, width, count) in PHASES.items():
        middle = start + width * count / 2
        words = f"{HEADINGS[phase]}\n{FLOPS[phase] / whole:.0%} of FLOPs"
        p.text(middle, 0.42, words, fontsize=11)
        for axes in (p.bars, p.sums):
            for edge in (start, start + width * count):
                axes.axvline(edge, color="#cccccc", linewidth=0.8, zorder=0)
    bold = dict(fontsize=13, fontweight="bold")
    p.text(mlp_end / 2, 1.35, "forward", **bold)
    p.text((PHASES["1"][0] + END) / 2 - 0.3, 1.35, "backward", **bold)
    p.text(
        (mlp_end + PHASES["1"][0]) / 2, 0.42, "layers\nabove,\nloss", fontsize=11, color="#666666"
    )
    p.bars.set_ylim(p.bottom, 1.7)
    p.bars.set_xlim(-1.75, END + 0.05)
    p.bars.set_axis_off()
    for side in ("top", "right", "bottom"):
        p.sums.spines[side].set_visible(False)
    p.sums.set_xticks([])
    p.sums.spines["left"].set_position(("data", -0.05))
    p.sums.yaxis.set_label_coords(0.07, 0.45)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    p.figure.savefig(path, facecolor="white", metadata=metadata, dpi=110)
    for peak, phase in peaks:
        print(f"{phase:10} {peak:.4f} units")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("schedule.svg"))
    matplotlib.rcParams["svg.hashsalt"] = "longctx"
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()
