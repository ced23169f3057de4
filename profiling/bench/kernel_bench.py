"""Times each kernel against its peers, in one process: python profiling/bench/kernel_bench.py

Per op, implementation and length it prints forward ms, forward+backward ms, peak extra GiB, TB/s
over the fewest bytes the op can move, and the fraction of the device's copy rate (for the loss: of
the matmul rate), both measured in the same run. It writes a JSON file and, with matplotlib, a bar
chart.

Fewest bytes, in units of tokens x hidden elements, forward + backward: RMSNorm and LayerNorm 2 + 3,
RoPE 2.5 + 2.5 (`rope_tables` is the same by given tables), SwiGLU and GeGLU 10.5 + 17.5 (F =
14336), squared ReLU and GELU by tanh 7 + 10.5, cross-entropy of given bf16 logits 31.3 + 31.3 (V =
128256). The loss with lm_head counts 6 tokens V D operations (2 forward); its ceiling is the rate
of the three lm_head products at 8192 tokens, in bf16, one after the other, with normally
distributed operands. Peak extra is what is allocated beyond the inputs: results, gradients and
workspace.

AdamW steps on the parameters of one layer of Llama-3.1-8B, each implementation over the bytes that
it moves itself: 26 a parameter for bf16 weights, remainders and gradients, 28 for torch's in fp32.

Matrix products draw all the power the device may have, and their rate falls with the clock. Loss
and ceiling are therefore timed alike: back to back for `--seconds`, of which the first third is not
counted. The power depends on the numbers too: with the softmax's gradient in the place of normally
distributed logits the products are 2% faster (`own_fraction` is over that rate).

Tuning notes (one H200, 131072 tokens, hidden 4096, bf16, fractions of the copy rate):
- RMSNorm backward: one row at a time, second sum after the first, 0.67; sums side by side 0.80; the
  next rows prefetched as well 0.94, with a residual's gradient 0.97 (three stages, two programs a
  multiprocessor: registers allow no more). Forward 0.96 with any block.
- RoPE 0.95 with 4 warps a token (40 heads), 0.81 with 8. SwiGLU 1.00 with any block of 512 to 2048.
- A norm's or a rotation's forward+backward costs 0.2 ms on the host (two launches, autograd), which
  is more than the device needs at 4096 and 8192 tokens; the layer's schedule runs ahead of it.
- Loss: the fp32 d_weight costs 8 V D bytes a product: 622 TFLOP/s for 3072 rows, 638 for 4096,
  against 684. fp32 logits: 619 TFLOP/s for 512 rows, 632 for 1024, 641 for 2048. d_hidden: 707 for
  3072 rows, 671 for 3584, whose last wave of tiles is a third full. Cross-entropy holds each row in
  the registers of 16 programs: 3.2 TB/s with 64 registers a thread, 2.6 without that limit.
  Liger is faster at 131072 tokens (5%): bf16 logits of 4096 rows and a bf16 d_weight. Its gradients
  are 9 to 11 times less exact at logits of 10, as exact at logits of 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.constants import GIB
from longctx.head.logits_loss import cross_entropy
from longctx.head.loss import linear_cross_entropy, linear_cross_entropy_reference
from longctx.kernels.adamw import Options, adamw_, split_master, weight_checksums
from longctx.kernels.cross_entropy import cross_entropy_forward
from longctx.kernels.norm import layer_norm, norm_reference, rms_norm
from longctx.kernels.rope import rope, rope_reference
from longctx.kernels.rope_tables import apply_rotary_pos_emb
from longctx.kernels.swiglu import activate, geglu, swiglu, swiglu_reference
from profiling.bench.efficient_ce import efficient_cross_entropy
from profiling.results import results_file, write_results

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EPS = 4096, 14336, 32, 8, 128, 128256, 1e-5
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
GATED = {"swiglu": "silu", "geglu": "gelu_tanh"}
OPS = ("rms_norm", "layer_norm", "rope", "rope_tables", *GATED, *ACTIVATIONS)
OPS += ("cross_entropy", "linear_cross_entropy")
# What they overwrite may not be a leaf.
OVERWRITES = ("rope", *GATED, *ACTIVATIONS, "cross_entropy")
IMPLS = ("longctx", "liger", "compile", "eager", "functional", "cce", "torch_linear_ce")
IMPLS += ("efficient_ce",)
LAYER_PARAMETERS = 2 * HIDDEN * (HIDDEN + KV_HEADS * HEAD_DIM) + 3 * HIDDEN * INTERMEDIATE
UNITS = {"rms_norm": 5.0, "layer_norm": 5.0, "rope": 5.0, "rope_tables": 5.0}
UNITS |= dict.fromkeys(GATED, 28.0) | dict.fromkeys(ACTIVATIONS, 17.5)
UNITS["cross_entropy"] = 2 * VOCAB / HIDDEN
Case = tuple[str, Callable[..., Any]]


def peers(op: str) -> Iterator[Case]:
    """(impl, function of the op's inputs). A peer that is missing is named and left out."""
    from transformers.models.llama import modeling_llama as hf

    if op == "rms_norm":
        yield "longctx", lambda x, w: rms_norm(x, w, EPS)
        yield "eager", lambda x, w: _hf_norm(hf, w)(x)
        yield "compile", _compiled(lambda x, w: norm_reference(x, w, EPS))
        yield "functional", lambda x, w: torch.nn.functional.rms_norm(x, (HIDDEN,), w, EPS)
    elif op == "layer_norm":
        yield "longctx", lambda x, w, b: layer_norm(x, w, EPS, bias=b)
        yield "eager", lambda x, w, b: torch.nn.functional.layer_norm(x, (HIDDEN,), w, b, EPS)
        yield "compile", _compiled(lambda x, w, b: norm_reference(x, w, EPS, bias=b, centred=True))
    elif op == "rope":
        yield "longctx", lambda q, k, p, f: rope(q, k, p, f)
        yield "eager", lambda q, k, p, f: hf.apply_rotary_pos_emb(q, k, *_cos_sin(p, f), 1)
        yield (
            "compile",
            _compiled(lambda q, k, p, f: (rope_reference(q, p, f), rope_reference(k, p, f))),
        )
    elif op == "rope_tables":
        yield "longctx", lambda q, k, p, f: apply_rotary_pos_emb(*_heads_first(q, k), *_table(p, f))
        yield (
            "eager",
            lambda q, k, p, f: hf.apply_rotary_pos_emb(*_heads_first(q, k), *_table(p, f)),
        )
        by_table = _compiled(hf.apply_rotary_pos_emb)
        yield "compile", lambda q, k, p, f: by_table(*_heads_first(q, k), *_table(p, f))
    elif op in ACTIVATIONS:
        yield "longctx", lambda x: activate(x, op)
        yield "eager", ACTIVATIONS[op]
        yield "compile", _compiled(lambda x: swiglu_reference(x, activation=op))
        return  # Liger has neither without a gate
    elif op in GATED:
        yield "longctx", swiglu if op == "swiglu" else geglu
        act = torch.nn.functional.silu if op == "swiglu" else ACTIVATIONS["gelu_tanh"]
        yield "eager", lambda g, u: act(g) * u
        yield "compile", _compiled(lambda g, u: swiglu_reference(g, u, activation=GATED[op]))
    elif op == "cross_entropy":
        yield "longctx", cross_entropy
        yield "eager", lambda x, y: torch.nn.functional.cross_entropy(x.float(), y)  # as in HF
        yield "functional", torch.nn.functional.cross_entropy
        yield "compile", _compiled(lambda x, y: torch.nn.functional.cross_entropy(x.float(), y))
    else:
        yield "longctx", linear_cross_entropy
        yield "eager", linear_cross_entropy_reference
        yield "compile", _compiled(linear_cross_entropy_reference)
        if hasattr(torch.nn.functional, "linear_cross_entropy"):
            yield "torch_linear_ce", torch.nn.functional.linear_cross_entropy
        else:
            print("no torch.nn.functional.linear_cross_entropy in this torch: left out")
        try:
            from cut_cross_entropy import linear_cross_entropy as cce

            yield "cce", cce
        except ImportError as e:
            print(f"no cut_cross_entropy: left out ({e})")
        yield "efficient_ce", efficient_cross_entropy
    try:
        yield "liger", _liger(op)
    except ImportError as e:
        print(f"no liger_kernel: left out ({e})")


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _liger(op: str) -> Callable[..., Any]:
    if op == "rms_norm":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Norm

        return lambda x, w: Norm.apply(x, w, EPS, 0.0, "llama", True)
    if op == "layer_norm":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, EPS)
    if op.startswith("rope"):
        from liger_kernel.ops.rope import LigerRopeFunction as Rope

        return lambda q, k, p, f: Rope.apply(*_heads_first(q, k), *_table(p, f), p[None], 1)
    if op == "swiglu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return lambda g, u: LigerSiLUMulFunction.apply(g, u)
    if op == "geglu":
        from liger_kernel.ops.geglu import LigerGELUMulFunction

        return lambda g, u: LigerGELUMulFunction.apply(g, u)
    if op == "cross_entropy":
        from liger_kernel.transformers.functional import liger_cross_entropy

        return lambda x, y: liger_cross_entropy(x, y)
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return liger_fused_linear_cross_entropy(hidden, weight, labels)

    return loss


def _hf_norm(hf: Any, weight: Tensor) -> Any:
    with torch.device("meta"):
        norm = hf.LlamaRMSNorm(HIDDEN, eps=EPS)
    del norm.weight
    norm.weight = weight
    return norm


_tables: dict[int, tuple[Tensor, Tensor]] = {}


def _cos_sin(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """HF's tables, made once per step and shared by all layers, so not timed."""
    if len(positions) not in _tables:
        angle = positions.float()[:, None] * inv_freq
        table = torch.cat((angle, angle), dim=-1)
        _tables.clear()
        _tables[len(positions)] = table.cos().bfloat16(), table.sin().bfloat16()
    return _tables[len(positions)]


def _table(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = _cos_sin(positions, inv_freq)
    return cos[None], sin[None]


def _heads_first(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns views of q and k in the shape of Hugging Face's attention, (1, heads, tokens, d)."""
    return q[None].transpose(1, 2), k[None].transpose(1, 2)


def inputs(op: str, tokens: int, device: str = "cuda") -> tuple[list[Tensor], list[Tensor]]:
    """(the op's inputs, gradients of its outputs), random bf16."""

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, device=device, dtype=torch.bfloat16) * scale
        return x.requires_grad_()

    if op == "rms_norm":
        return [rand(tokens, HIDDEN), rand(HIDDEN)], [rand(tokens, HIDDEN).detach()]
    if op == "layer_norm":
        return [rand(tokens, HIDDEN), rand(HIDDEN), rand(HIDDEN)], [rand(tokens, HIDDEN).detach()]
    if op.startswith("rope"):
        q, k = rand(tokens, HEADS, HEAD_DIM), rand(tokens, KV_HEADS, HEAD_DIM)
        exponent = torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM
        positions = torch.arange(tokens, device=device)
        grads = [torch.randn_like(x) for x in (q, k)]
        return [q, k, positions, 1 / 500000**exponent], grads
    if op in ACTIVATIONS:
        return [rand(tokens, INTERMEDIATE)], [rand(tokens, INTERMEDIATE).detach()]
    if op in GATED:
        return [rand(tokens, INTERMEDIATE), rand(tokens, INTERMEDIATE)], [
            rand(tokens, INTERMEDIATE).detach()
        ]
    if op == "cross_entropy":
        return [rand(tokens, VOCAB), torch.randint(VOCAB, (tokens,), device=device)], []
    weight = rand(VOCAB, HIDDEN, scale=HIDDEN**-0.5).detach().requires_grad_()
    return [rand(tokens, HIDDEN), weight, torch.randint(VOCAB, (tokens,), device=device)], []


class _Alias(torch.autograd.Function):
    """Turns leaves into intermediate results at no cost, as a projection's output would be."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def sustained_ms(function: Callable[[], Any], seconds: float) -> float:
    """Mean ms of a call, back to back for `seconds`, of which the first third is warm-up."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    function()
    torch.cuda.synchronize()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds / 3:
        function()
        torch.cuda.synchronize()
        calls += 1
    calls = max(2, 2 * calls)
    first.record()
    for _ in range(calls):
        function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / calls


def measure(
    op: str, function: Callable[..., Any], tokens: int, rep_ms: int, seconds: float
) -> dict[str, float]:
    arguments, grads = inputs(op, tokens)
    leaves = [x for x in arguments if x.requires_grad]

    def forward() -> list[Tensor]:
        free = list(_Alias.apply(*leaves)) if op in OVERWRITES else leaves
        outs = function(*free, *arguments[len(leaves) :])
        return list(outs) if isinstance(outs, tuple) else [outs]

    def step() -> None:
        outs = forward()
        if not grads:
            outs[0].backward()
            return
        outs = [
            o.movedim(1, 2).view_as(g) if o.dim() == 4 else o
            for o, g in zip(outs, grads, strict=True)
        ]
        torch.autograd.backward(outs, grads)

    def clear() -> None:
        for x in leaves:
            x.grad = None

    step()
    clear()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = (torch.cuda.max_memory_allocated() - base) / GIB
    clear()

    def timed(f: Callable[[], Any]) -> float:
        if op in UNITS:
            return do_bench(
                f, warmup=rep_ms // 4, rep=rep_ms, grad_to_none=leaves, return_mode="median"
            )
        return sustained_ms(lambda: (clear(), f()), seconds)

    both = timed(step)
    clear()
    with torch.no_grad():
        alone = timed(forward)
    return {"fwd_ms": alone, "fwd_bwd_ms": both, "peak_gib": peak}


def copy_rate() -> float:
    """TB/s, bytes read plus bytes written, of an 8 GiB copy."""
    x = torch.randn(2**31, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * x.nbytes / do_bench(lambda: y.copy_(x), return_mode="median") / 1e9


def matmul_rates(seconds: float, tokens: int = 8192) -> tuple[float, float]:
    """TFLOP/s of the lm_head's three products in turn, in bf16: with normally distributed operands,
    and with the softmax's gradient for two of them.
    """
    hidden, weight, labels = (x.detach() for x in inputs("linear_cross_entropy", tokens)[0])
    logits = hidden @ weight.t()
    gradient = logits.clone()
    cross_entropy_forward(logits, labels, d_logits=gradient)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def rate(g: Tensor) -> float:
        def products() -> None:
            torch.mm(hidden, weight.t(), out=logits)
            torch.mm(g, weight, out=d_hidden)
            torch.mm(g.t(), hidden, out=d_weight)

        return 6 * tokens * VOCAB * HIDDEN / sustained_ms(products, seconds) / 1e9

    return rate(logits), rate(gradient)


def gradient_errors() -> list[dict[str, Any]]:
    """Relative error of the loss's gradients against fp32, logits of about 1 and about 10."""
    rows = []
    for logit in (1.0, 10.0):
        torch.manual_seed(0)
        hidden, weight, labels = inputs("linear_cross_entropy", 2048)[0]
        weight.data *= logit
        truth = [x.detach().float().requires_grad_() for x in (hidden, weight)]
        linear_cross_entropy_reference(*truth, labels).backward()
        for impl, function in peers("linear_cross_entropy"):
            if impl == "compile":
                continue
            hidden.grad = weight.grad = None
            function(hidden, weight, labels).backward()
            errors = [
                ((x.grad.float() - t.grad).norm() / t.grad.norm()).item()
                for x, t in zip((hidden, weight), truth, strict=True)
            ]
            print(f"gradient error, logits ~{logit:g}: {impl:16s} {errors[0]:.2e} {errors[1]:.2e}")
            names = {"d_hidden_error": errors[0], "d_weight_error": errors[1]}
            rows.append({"op": "linear_cross_entropy", "impl": impl, "logits": logit} | names)
    return rows


def adamw_rows(copy: float, rep_ms: int) -> list[dict[str, Any]]:
    """One AdamW step on a layer's parameters; `copy` is the copy rate in TB/s."""
    n, hyper = LAYER_PARAMETERS, {"lr": 1e-5, "eps": 1e-8, "weight_decay": 0.1}
    master, grad = (torch.randn(n, device="cuda") * s for s in (0.02, 1e-3))

    def longctx() -> Callable[[], None]:
        weight, remainder = split_master(master)
        moments = (torch.zeros_like(master) for _ in "mv")
        state = [weight, remainder, *moments, grad.bfloat16()]
        more = {"scale": torch.ones((), device="cuda"), "checksums": weight_checksums(weight)}
        options = Options(beta1=0.9, beta2=0.999, step=10, **hyper)
        return lambda: adamw_(*state, options, **more)

    def torch_fused() -> Callable[[], None]:
        parameter = master.clone().requires_grad_()
        parameter.grad = grad
        return torch.optim.AdamW([parameter], fused=True, **hyper).step

    rows = []
    for impl, make, bytes_each in (("longctx", longctx, 26), ("torch_fused", torch_fused, 28)):
        torch.cuda.empty_cache()
        ms = do_bench(make(), warmup=rep_ms // 4, rep=rep_ms, return_mode="median")
        rate = bytes_each * n / ms / 1e9
        row = {"op": "adamw", "impl": impl, "parameters": n, "bytes_per_parameter": bytes_each}
        rows.append(row | {"ms": ms, "tb_per_s": rate, "fraction": rate / copy})
        print(f"adamw, {n:,} parameters: {impl:12s}{ms:8.3f} ms{rate:7.2f} TB/s{rate / copy:7.3f}")
    return rows


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no matplotlib: chart left out")
        return
    ops = [op for op in OPS if any(r["op"] == op for r in rows)]
    figure, axes = plt.subplots(1, len(ops), figsize=(4.2 * len(ops), 4.2), squeeze=False)
    for axis, op in zip(axes[0], ops, strict=True):
        mine = [r for r in rows if r["op"] == op]
        lengths = sorted({r["tokens"] for r in mine})
        impls = [i for i in IMPLS if any(r["impl"] == i for r in mine)]
        width = 0.8 / len(impls)
        for i, impl in enumerate(impls):
            found = [(lengths.index(r["tokens"]), r["fraction"]) for r in mine if r["impl"] == impl]
            places = [n + (i - (len(impls) - 1) / 2) * width for n, _ in found]
            axis.bar(places, [f for _, f in found], width, color=f"C{IMPLS.index(impl)}")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axis.set_title(op)
        axis.set_xlabel("tokens")
    axes[0][0].set_ylabel("forward + backward, fraction of the ceiling")
    figure.suptitle("copy rate over the fewest bytes is 1 (loss: the matmul rate)", fontsize=10)
    shown = [i for i in IMPLS if any(r["impl"] == i for r in rows)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{IMPLS.index(i)}") for i in shown]
    figure.legend(handles, shown, loc="lower center", ncol=len(shown), frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ops", nargs="+", choices=(*OPS, "adamw"), default=(*OPS, "adamw"))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 32768, 131072])
    parser.add_argument("--rep-ms", type=int, default=200, help="time for each of the others")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each loss and matmul rate")
    parser.add_argument("--impls", nargs="+", help="only these implementations")
    parser.add_argument(
        "--out", type=results_file, default=ROOT / "profiling/results/h200_kernels.json"
    )
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)

    copy, (matmul, own) = copy_rate(), matmul_rates(options.seconds)
    print(
        f"copy {copy:.3f} TB/s, matmul {matmul:.0f} TFLOP/s, with softmax gradients {own:.0f}",
        flush=True,
    )
    print(f"{'op':22s}{'impl':16s}{'tokens':>8s}   fwd ms  both ms peak GiB    TB/s fraction")
    rows = []
    for op in (op for op in options.ops if op in OPS):
        for impl, function in peers(op):
            if options.impls and impl not in options.impls:
                continue
            for tokens in options.tokens:
                torch.cuda.empty_cache()
                row = {"op": op, "impl": impl, "tokens": tokens, "hidden": HIDDEN, "dtype": "bf16"}
                try:
                    row |= measure(op, function, tokens, options.rep_ms, options.seconds)
                except torch.OutOfMemoryError:
                    print(f"{op:22s}{impl:16s}{tokens:8d}   out of memory", flush=True)
                    continue
                except Exception as e:  # a peer that cannot run this case must not end the run
                    print(f"{op:22s}{impl:16s}{tokens:8d}   failed: {repr(e)[:200]}", flush=True)
                    continue
                if op in UNITS:
                    rate = UNITS[op] * tokens * HIDDEN * 2 / row["fwd_bwd_ms"] / 1e9
                    row |= {"tb_per_s": rate, "fraction": rate / copy}
                else:
                    rate = 6 * tokens * VOCAB * HIDDEN / row["fwd_bwd_ms"] / 1e9
                    row |= {"tb_per_s": None, "tflop_per_s": rate, "fraction": rate / matmul}
                    row |= {"own_fraction": rate / own}
                rows.append(row)
                print(
                    f"{op:22s}{impl:16s}{tokens:8d}{row['fwd_ms']:9.3f}{row['fwd_bwd_ms']:9.3f}"
                    f"{row['peak_gib']:9.2f}{rate:8.2f}{row['fraction']:9.3f}",
                    flush=True,
                )
    errors = gradient_errors() if "linear_cross_entropy" in options.ops else []
    if rows:
        chart(rows, options.out.with_suffix(".png"))
    if "adamw" in options.ops:
        rows += adamw_rows(copy, options.rep_ms)

    ceilings = {
        "copy_tb_per_s": copy,
        "matmul_tflop_per_s": matmul,
        "matmul_own_tflop_per_s": own,
    }
    write_results(options.out, rows, extra={"ceilings": ceilings, "gradient_errors": errors})
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
