"""Every kernel compiles for sm_80 and sm_90 without a GPU, and spills no register in the
configuration that the public functions choose. In fp32, a dtype of tests, sm_80 is enough: it has
less shared memory.

The kernels compile in a process of their own, because Triton may be set to interpret them in this
one. That process runs this file as a script, which prints one JSON line per kernel, architecture
and dtype.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from paths import PYTHONPATH

pytestmark = pytest.mark.ci
ACTIVATED = (("swiglu", "silu", True, 1.0), ("geglu", "gelu_tanh", True, 1.0))
ACTIVATED += (("scaled_swiglu", "silu", True, 0.7), ("output_gate", "sigmoid", True, 1.0))
ACTIVATED += (("relu2", "relu2", False, 1.0), ("gelu_tanh", "gelu_tanh", False, 1.0))
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # what one program may have
TARGETS = {"bf16": (80, 90), "fp32": (80,)}
"""The architectures for which a kernel in a dtype is compiled."""


def _cases():
    """(name, kernel, dtype, arguments, configuration).

    An argument is a pointer type, a constant, or a size. Sizes are those of Llama-3.1-8B,
    configurations those that the public functions choose.
    """
    import triton.language as tl

    from longctx.kernels import (
        adamw,
        adamw_many,
        causal_conv,
        clamped_swiglu,
        conv_heads,
        cross_entropy,
        cross_entropy_rows,
        delta_gates,
        delta_rule,
        divergence,
        fp8,
        gated_norm,
        grouped_mm,
        grouped_sum,
        log_softmax,
        mxfp4,
        nf4,
        norm,
        places,
        rope,
        scale,
        sinks,
        sort_slots,
        spread,
        square_sums,
        state_space,
        swiglu,
    )
    from longctx.kernels.launch import Config

    def rms(c, HEADS=1, **flags):
        how = {"LLAMA_ROUNDING": True, "OFFSET": 0.0, "HEADS": HEADS}
        how |= {"CENTRED": False, "HAS_BIAS": False, "HAS_DB": False}
        return {**flags, **how, "ROWS": c.rows, "BLOCK": c.block}

    cases = ((False, 1), (True, 1), (False, 32))  # d_residual; heads of q in a wider buffer
    for t in ("bf16", "fp32"):
        p = f"*{t}"
        for D in (64, 4096, 8192):
            pointers = {f"{n}_ptr": p for n in ("x", "weight", "bias", "out")}
            strides = {f"stride_{n}": D for n in ("x", "out")}
            strides |= {f"stride_{n}_head": D for n in ("x", "out")}
            sizes = {"T": 131072, "D": D, **strides, "eps": "fp32"}
            for heads in (1, 32) if D == 64 else (1,):
                c = norm.forward_config(D)
                given = {"HAS_RSTD": D == 4096, "rstd_ptr": "*fp32"}
                arguments = {**pointers, **sizes, **given, **rms(c, heads)}
                yield f"rms_norm_forward {D}", norm._forward_kernel, t, arguments, c

            pointers = {f"{n}_ptr": p for n in ("dy", "x", "weight", "d_residual", "out")}
            strides = {f"stride_{n}": D for n in ("dy", "x", "d_residual", "out")}
            strides |= {f"stride_{n}_head": D for n in ("dy", "x", "out")}
            sizes = {"T": 131072, "D": D, **strides, "eps": "fp32"}
            sizes |= {f"{n}_partial_ptr": "*fp32" for n in ("dw", "db")}
            for residual, heads in cases if D == 64 else cases[:2]:
                c = norm.backward_config(D, 2 if t == "bf16" else 4)
                flags = {"HAS_RESIDUAL": residual, "HAS_DW": True, "STAGES": c.num_stages}
                arguments = {**pointers, **sizes, **rms(c, heads, **flags)}
                yield f"rms_norm_backward {D}", norm._backward_kernel, t, arguments, c

        for D, offset, heads in ((64, 0.0, 32), (64, 1.0, 1), (8192, 1.0, 1)):
            pointers = {f"{n}_ptr": p for n in ("x", "weight", "bias", "dy", "d_residual", "out")}
            pointers |= {"dw_partial_ptr": "*fp32", "db_partial_ptr": "*fp32"}
            strides = {f"stride_{n}": D for n in ("dy", "x", "d_residual", "out")}
            strides |= {f"stride_{n}_head": D for n in ("dy", "x", "out")}
            flags = {"HAS_BIAS": True, "HAS_DW": True, "HAS_DB": True, "HAS_RESIDUAL": heads == 1}
            flags |= {"OFFSET": offset, "HEADS": heads, "T": 131072, "D": D, "eps": "fp32"}
            flags |= {"CENTRED": True, "HAS_RSTD": False, "rstd_ptr": "*fp32"}
            flags |= {"LLAMA_ROUNDING": False}
            forward, backward = norm._forward_kernel, norm._backward_kernel
            for name, kernel, c in (
                ("layer_norm_forward", forward, norm.forward_config(D)),
                (
                    "layer_norm_backward",
                    backward,
                    norm.backward_config(D, 2 if t == "bf16" else 4),
                ),
            ):
                sizes = {"ROWS": c.rows, "BLOCK": c.block, "STAGES": c.num_stages}
                yield f"{name} {D}", kernel, t, pointers | strides | flags | sizes, c

        c = rope.default_config(32, 128)
        strides = {
            f"stride_{x}{o}_{n}": s
            for x in ("q", "k")
            for o in ("", "_out")
            for n, s in (("token", 4096), ("head", 128))
        }
        arguments = {
            **{f"{n}_ptr": p for n in ("q", "k", "q_out", "k_out")},
            **{"positions_ptr": "*i64", "inv_freq_ptr": "*fp32", "stride_table": 0},
            **{"T": 131072, "H": 32, "K": 8, "half": 64, **strides, "attention_scaling": "fp32"},
            **{"TABLES": False, "INVERSE": True, "TOKENS": c.rows, "Q_BLOCK": 32, "K_BLOCK": 8},
            **{"HALF_BLOCK": c.block, "rows_ptr": "*i32", "ROWS": False},
        }
        for name, interleaved in (("rope", False), ("interleaved_rope", True)):
            how = {"INTERLEAVED": interleaved}
            yield name, rope._rope_kernel, t, arguments | how, c
        rows = {"rows_ptr": "*i32", "ROWS": True, "INTERLEAVED": False}
        yield "rope_rows", rope._rope_kernel, t, arguments | rows, c
        tables = {"positions_ptr": p, "inv_freq_ptr": p, "stride_table": 128, "TABLES": True}
        how = {"INTERLEAVED": False}
        yield "rope_tables", rope._rope_kernel, t, arguments | how | tables, c

        c = swiglu.default_config(14336)
        sizes = {"T": 131072, "F": 14336, "blocks_per_row": 7, "ROWS": c.rows, "BLOCK": c.block}
        arguments = {f"{n}_ptr": p for n in ("gate", "up", "out")} | sizes
        arguments |= {f"stride_{n}": 14336 for n in ("gate", "up", "out")}
        for name, kind, gated, scaled in ACTIVATED:
            how = {"HAS_UP": gated, "ACTIVATION": kind, "GATE_SCALE": scaled}
            yield f"{name}_forward", swiglu._forward_kernel, t, arguments | how, c
        names = ("d_product", "gate", "up", "product")
        arguments = {f"{n}_ptr": p for n in names} | sizes | {"HAS_PRODUCT": True}
        arguments |= {f"stride_{n}": 14336 for n in names}
        for name, kind, gated, scaled in ACTIVATED:
            how = {"HAS_UP": gated, "ACTIVATION": kind, "GATE_SCALE": scaled}
            yield f"{name}_backward", swiglu._backward_kernel, t, arguments | how, c

        arguments = {
            **{"x_ptr": "*fp32", "scale_ptr": "*fp32", "out_ptr": p, "numel": 2**29, "BLOCK": 2048}
        }
        yield "scale", scale._scale_kernel, t, arguments, Config(block=2048, num_warps=4)

        arguments = {"sums_ptr": "*fp32", "out_ptr": p, "T": 131072, "rank": 16}
        arguments |= {"stride_sums": 32, "factor": "fp32", "ROWS": 128, "BLOCK": 16}
        yield "spread", spread._spread_kernel, t, arguments, Config(block=16, num_warps=4)

        arguments = {"a_ptr": "*fp32", "a_out_ptr": p, "b_ptr": "*fp32", "b_out_ptr": p}
        arguments |= {"a_numel": 2**18, "b_numel": 2**18, "rank": 16, "BLOCK": 1024}
        yield "spread_factors", spread._factors_kernel, t, arguments, spread.FACTORS

        pointers = {f"{n}_ptr": p for n in ("a", "b", "a_out", "b_out")}
        arguments = {**pointers, "places_ptr": "*i32", "width": 1024, "PLACES": 3, "BLOCK": 1024}
        arguments |= {"stride_a_out": 6144, "stride_b_out": 6144}
        yield "places", places._places_kernel, t, arguments, Config(block=1024, num_warps=4)

        arguments = {f"{n}_ptr": p for n in ("o", "do", "sinks")} | {"lse_ptr": "*fp32"}
        arguments |= {"T": 131072, "d": 64, "stride_token": 4096, "stride_lse": 131072}
        arguments |= {"stride_head": 64, "TOKENS": sinks.CONFIG.rows, "BLOCK": sinks.CONFIG.block}
        yield "add_sinks", sinks._add_kernel, t, arguments, sinks.CONFIG
        strides = {
            f"stride_{x}_{n}": s for x in ("do", "o") for n, s in (("token", 4096), ("head", 64))
        }
        arguments |= strides | {"parts_ptr": "*fp32"}
        yield "sinks_grad", sinks._grad_kernel, t, arguments, sinks.CONFIG

        c = causal_conv.CONFIG
        tensors = ("dy", "x", "weight", "bias", "begin", "out", "dx", "d_begin")
        arguments = {f"{n}_ptr": p for n in tensors} | {"parts_ptr": "*fp32", "TAPS": 4}
        arguments |= {"T": 16384, "C": 8192, "TOKENS": c.rows, "BLOCK": c.block}
        arguments |= {"HAS_BIAS": True, "HAS_DW": True}
        for x in ("", "_dy", "_x", "_begin"):
            arguments |= {f"stride{x}_row": 16384 * 8192, f"stride{x}_token": 8192}
        for name, packed in (("", False), ("_of_documents", True)):
            arguments |= {"positions_ptr": "*i32", "HAS_POSITIONS": packed}
            arguments |= {"HAS_BEGIN": not packed}
            yield f"causal_conv_forward{name}", causal_conv._forward_kernel, t, arguments, c
            yield f"causal_conv_backward{name}", causal_conv._backward_kernel, t, arguments, c

        c = conv_heads.CONFIG
        arguments = {f"{n}_ptr": p for n in ("x", "weight", "bias", "begin", "dout", "out")}
        arguments |= {"T": 16384, "heads": 16, "width": 128, "stride_out": 8192, "eps": "fp32"}
        arguments |= {"positions_ptr": "*i32", "TAPS": 4, "TOKENS": c.rows, "BLOCK": c.block}
        for x in ("", "_begin"):
            arguments |= {f"stride{x}_row": 16384 * 8192, f"stride{x}_token": 8192}
        for name, gradient in (("", False), ("_gradient", True)):
            for packed in (False, True):
                flags = {"NORMED": packed, "HAS_POSITIONS": packed, "HAS_BEGIN": not packed}
                flags |= {"HAS_BIAS": not packed}
                given = {**arguments, **flags, "GRADIENT": gradient}
                yield f"conv_heads{name}", conv_heads._heads_kernel, t, given, c

        c = delta_gates.config(32)
        tensors = ("a", "b", "A", "bias", "beta", "dbeta", "da", "db")
        arguments = {f"{n}_ptr": p for n in tensors} | {"ROWS": c.rows, "BLOCK": c.block}
        arguments |= {f"{n}_ptr": "*fp32" for n in ("g", "dg", "parts")}
        arguments |= {"N": 16384, "H": 32, "stride_a": 32, "stride_b": 32, "most": "fp32"}
        arguments |= {"HAS_SUMS": True}
        yield "delta_gates", delta_gates._gates_kernel, t, arguments, c
        yield "delta_gates_gradient", delta_gates._gates_grad_kernel, t, arguments, c

        widest = [(8192, True)] if t == "bf16" else []  # no model's mixers have it in fp32
        for D, first in ((128, False), (3072, True), *widest):
            c = gated_norm.config(D)
            pointers = {f"{n}_ptr": p for n in ("dy", "x", "gate", "weight", "out", "dx", "d_gate")}
            arguments = {**pointers, "parts_ptr": "*fp32", "N": 2**19, "D": D, "eps": "fp32"}
            arguments |= {"groups": 1, "stride_gate": 2 * D, "HAS_DW": True, "GATE_FIRST": first}
            arguments |= {"ROWS": c.rows, "BLOCK": c.block}
            yield f"gated_norm_forward {D}", gated_norm._forward_kernel, t, arguments, c
            yield f"gated_norm_backward {D}", gated_norm._backward_kernel, t, arguments, c

        if t == "bf16":
            pointers = ("q", "k", "v", "do", "dv", "h", "dh", "dq", "dk", "dw")
            arguments = {f"{n}_ptr": p for n in pointers} | {"b_ptr": "*fp32", "db_ptr": "*fp32"}
            arguments |= {"B": 1, "T": 16384, "H": 32, "G": 32, "K": 128, "V": 128}
            arguments |= {"cut_ptr": "*i64", "scale": "fp32", "CHUNK": 64}
            arguments |= {"BLOCK_K": 64, "BLOCK_V": 64}
            arguments |= {"BLOCKS_V": 2}
            yield "delta_rule", delta_rule._chunk_kernel, t, arguments, delta_rule.CONFIG
            yield from _scan_cases(state_space)

        yield from _grouped_cases(grouped_mm, t)

        c = sort_slots.CONFIG
        tensors = ("counts", "behind", "rows", "places", "ends")
        arguments = {f"{n}_ptr": "*i32" for n in tensors} | {"ids_ptr": "*i16"}
        arguments |= {"order_ptr": "*i64", "n": 65536, "E": 128, "k": 8}
        arguments |= {"BLOCK": c.block, "EXPERTS": sort_slots.EXPERTS}
        yield "count_slots", sort_slots._count_kernel, t, arguments, c
        yield "place_slots", sort_slots._place_kernel, t, arguments, c

        c = grouped_sum.CONFIG
        arguments = {"a_ptr": p, "ends_ptr": "*i32", "rows_ptr": "*i32", "weights_ptr": "*fp32"}
        arguments |= {"acc_ptr": "*fp32", "width": 5760, "stride_a": 5760, "ADD": True}
        arguments |= {"HAS_ROWS": True, "HAS_WEIGHTS": True, "ROWS": c.rows, "BLOCK": c.block}
        yield "grouped_sum", grouped_sum._sum_kernel, t, arguments, c

        c = clamped_swiglu.CONFIG
        arguments = {f"{n}_ptr": p for n in ("made", "out", "d_product")}
        arguments |= {"T": 524288, "F": 2880, "blocks_per_row": 6, "stride_made": 5760}
        arguments |= {"stride_out": 2880, "stride_d_product": 2880, "alpha": "fp32"}
        arguments |= {"limit": "fp32", "ROWS": c.rows, "BLOCK": c.block}
        for name in ("forward", "backward"):
            kernel = getattr(clamped_swiglu, f"_{name}_kernel")
            yield f"clamped_swiglu_{name}", kernel, t, arguments, c

        pointers = {f"{n}_ptr": "*fp32" for n in ("code", "code2", "scale2", "offset")}
        arguments = {"packed_ptr": "*i32", **pointers, "scale_ptr": "*u8", "out_ptr": p}
        arguments |= {"words": 2**23, "BLOCK": 8, "BLOCK2": 256, "DOUBLE": True, "WORDS": 512}
        yield "nf4", nf4._dense_kernel, t, arguments, nf4.CONFIG
        arguments = {"packed_ptr": "*i32", "scale_ptr": "*u8", "out_ptr": p, "words": 2**20}
        arguments |= {"WORDS": mxfp4.CONFIG.block}
        yield "mxfp4", mxfp4._dense_kernel, t, arguments, mxfp4.CONFIG
        c, sizes = fp8.CONFIG, {"pieces": 2**17, "M": 4096, "G": 32, "L": 32}
        arguments = {"packed_ptr": "*i64", "scale_ptr": "*fp32", "out_ptr": p} | sizes
        arguments |= {"of_rows": 128, "of_columns": 128}
        arguments |= {"PIECES": 32, "WIDTH": 128, "EACH": 8, "BLOCK": c.block}
        yield "fp8", fp8._dense_kernel, t, arguments, c
        arguments |= {"packed_ptr": "*u8", "EACH": 1}
        yield "fp8_bytes", fp8._dense_kernel, t, arguments, c

        parts = "*i16" if t == "bf16" else p  # weight and remainder
        arguments = {
            **{"weight_ptr": parts, "remainder_ptr": parts, "grad_ptr": p, "scale_ptr": "*fp32"},
            **{"exp_avg_ptr": "*fp32", "exp_avg_sq_ptr": "*fp32", "numel": 2**28},
            **{n: "fp32" for n in ("decay", "one_minus_beta1", "one_minus_beta2")},
            **{"step_size": "fp32", "floor": "fp32", "SPLIT": t == "bf16", "HAS_SCALE": True},
            **{"checksums_ptr": "*i32", "CHECKS": t == "bf16"},
            "BLOCK": adamw.CONFIG.block,
        }
        yield "adamw", adamw._adamw_kernel, t, arguments, adamw.CONFIG

        dtype = tl.bfloat16 if t == "bf16" else tl.float32
        lanes = {n: square_sums.HOW[n] for n in ("LANES", "HALVINGS")} | {"chunk": 8192}
        arguments = {"x_ptr": p, "sums_ptr": "*fp32", "numel": 2**28} | lanes
        yield "square_sums", square_sums._one_kernel, t, arguments, square_sums.CONFIG
        table = {"table_ptr": "*i64", "rows": 449, "ALIGNED": True}
        arguments = {"sums_ptr": "*fp32", "DTYPE": dtype} | table | lanes
        yield "many_square_sums", square_sums._many_kernel, t, arguments, square_sums.CONFIG
        arguments = {"GRAD": dtype, "SPLIT": t == "bf16", "HAS_SCALE": True, "BLOCK": 1024} | table
        arguments |= {"guard_ptr": "*fp32", "HAS_GUARD": True}
        yield "many_adamw", adamw_many._many_kernel, t, arguments, adamw_many.CONFIG

        arguments = {
            **{"logits_ptr": "*fp32", "d_logits_ptr": p, "labels_ptr": "*i64"},
            **{"loss_ptr": "*fp32", "scale_ptr": "*fp32", "V": 128256},
            **{"stride_logits": 128256, "stride_d_logits": 128256},
            **{"label_smoothing": "fp32", "softcap": "fp32", "lse_square_scale": "fp32"},
            **{"ticket_ptr": "*i64", "words_ptr": "*i64", "HAS_GRAD": True, "HAS_SCALE": True},
        }
        for extra in (False, True):
            c = cross_entropy.default_config(128256, t == "bf16" and not extra)
            parts = -(-128256 // c.block)
            flags = {"HAS_SMOOTHING": extra, "HAS_SOFTCAP": extra, "HAS_LSE_SQUARE": extra}
            more = {"BLOCK": c.block, "PARTS": parts, "LANES": 1 << (parts - 1).bit_length()}
            more["OVERLAPS"] = t == "bf16"
            kernel = cross_entropy._cross_entropy_kernel
            yield "cross_entropy", kernel, t, arguments | flags | more, c
            given = {n: arguments[n] for n in ("labels_ptr", "loss_ptr", "V", "stride_logits")}
            given |= {n: "fp32" for n in ("label_smoothing", "softcap", "lse_square_scale")}
            given |= {"logits_ptr": p, "lse_ptr": "*fp32", **flags}
            c = cross_entropy_rows.values_config(128256)
            how = {"BLOCK": c.block, "STAGES": c.num_stages}
            yield "cross_entropy_rows", cross_entropy_rows._loss_kernel, t, given | how, c
            del given["loss_ptr"]
            given |= {"d_logits_ptr": p, "scale_ptr": "*fp32", "stride_d_logits": 128256}
            c = cross_entropy_rows.gradient_config(128256)
            kernel = cross_entropy_rows._gradient_kernel
            yield "cross_entropy_gradient", kernel, t, given | {"BLOCK": c.block}, c

        per_row = ("log_probs", "entropy", "mean_logits", "lse", "d_log_probs", "d_entropy")
        per_row += ("value", "offset", "teacher_lse", "d_values")
        arguments = {
            **{"logits_ptr": "*fp32", "d_logits_ptr": p, "labels_ptr": "*i64"},
            **{"is_top1_ptr": "*i8", **{f"{n}_ptr": "*fp32" for n in per_row}, "V": 151936},
            **{"stride_logits": 151936, "stride_d_logits": 151936, "stride_teacher": 151936},
            **{"teacher_ptr": "*fp32", "beta": "fp32", "inverse_temperature": "fp32"},
            **{"softcap": "fp32", "teacher_softcap": "fp32", "HAS_LOG_PROBS": True},
        }
        kernels = [(log_softmax, False, 0), (log_softmax, True, 0)]
        kernels += [(divergence, False, 0), (divergence, True, -1), (divergence, False, 1)]
        for module, capped, end in kernels:
            flags = {"HAS_SOFTCAP": capped, "HAS_TEACHER_SOFTCAP": capped, "END": end}
            for name in ("values", "gradient"):
                kernel = getattr(module, f"_{name}_kernel")
                c = getattr(module, f"{name}_config")(151936)
                flags |= {"HAS_ENTROPY": True, "BLOCK": c.block, "STAGES": c.num_stages}
                title = f"{module.__name__.rpartition('.')[2]}_{name}"
                yield title, kernel, t, arguments | flags, c


def _grouped_cases(grouped_mm, t: str):
    """Cases of experts' matmuls, with the sizes of Qwen3-30B-A3B: every tile that some number of
    slots, width and card chooses. The tile of large segments has all variants of the kernel, the
    others have the plain one and the one that holds most, an adapter's."""
    p, itemsize = f"*{t}", 2 if t == "bf16" else 4
    slots = {"ends_ptr": "*i32", "experts": 128, "width": 1536, "K": 2048, "EXPERTS": 128}
    slots |= {"first_expert": 5}
    configs = {
        grouped_mm.mm_config(n, 128, width, itemsize, 1024 * kib): None
        for n in (512, 65536)
        for width in (128, 1536)
        for kib in (99, 163)
    }
    largest = grouped_mm.mm_config(65536, 128, 1536, itemsize, 1024 * 163)
    for c in configs:
        pointers = {f"{n}_ptr": p for n in ("x", "weight", "bias", "u", "b", "out")}
        strides = {"stride_x": 2048, "stride_expert": 2**21, "stride_weight": 2048}
        strides |= {"stride_u": 16, "stride_b_expert": 2**15, "stride_b": 16, "stride_rank": 1}
        arguments = pointers | slots | strides | c.constants()
        arguments |= {"rows_ptr": "*i32", "r": 16, "stride_out": 1536}
        for name, by_inputs, even, biased, ranks in (
            ("", True, True, False, 0),
            ("_transposed", False, False, False, 0),
            ("_biased", False, False, True, 0),
            ("_adapted", True, True, False, grouped_mm.LEAST_RANKS),
            ("_adapted_widely", False, True, False, grouped_mm.MOST_RANKS),
        ):
            if ranks and t == "fp32":
                continue  # an A100 spills 16 bytes there, in a dtype that is for tests
            if c != largest and name not in ("", "_adapted_widely"):
                continue
            how = {"HAS_ROWS": by_inputs, "BY_INPUTS": by_inputs}
            how |= {"HAS_BIAS": biased, "RANKS": ranks}
            how |= {"EVEN_WIDTH": even, "EVEN_INPUTS": even, "HALVES": c.halves}
            yield f"grouped_mm{name}", grouped_mm._mm_kernel, t, arguments | how, c
    configs = {
        grouped_mm.outer_config(n, 128, width, 2048, itemsize, 1024 * kib): None
        for n in (65536, 262144)
        for width in (128, 1536)
        for kib in (99, 163)
    }
    for c in configs:
        pointers = {"a_ptr": p, "b_ptr": p, "rows_a_ptr": "*i32", "rows_b_ptr": "*i32"}
        strides = {"stride_a": 1536, "stride_b": 2048, "stride_expert": 2**21, "stride_acc": 2048}
        arguments = pointers | slots | strides | c.constants()
        for add in (True, False):
            how = {"HAS_ROWS_A": not add, "HAS_ROWS_B": True, "ADD": add}
            how |= {"EVEN_WIDTH": add, "EVEN_INPUTS": add, "acc_ptr": "*fp32" if add else p}
            yield "grouped_outer", grouped_mm._outer_kernel, t, arguments | how, c

    pointers = {f"{n}_ptr": p for n in ("z", "onto", "out")}
    pointers |= {"places_ptr": "*i32", "weights_ptr": "*fp32"}
    arguments = {**pointers, "D": 2048, "scale": "fp32", "HAS_WEIGHTS": True, "HAS_ONTO": True}
    arguments |= {f"stride_{n}": 2048 for n in ("z", "onto", "out")}
    arguments |= {"PLACES": 8, "BLOCK": grouped_mm.COMBINE.block}
    yield "combine", grouped_mm._combine_kernel, t, arguments, grouped_mm.COMBINE
    c = grouped_mm.DOTS
    arguments = {"a_ptr": p, "b_ptr": p, "out_ptr": "*fp32", "n": 65536, "D": 768}
    arguments |= {"stride_a": 768, "stride_b": 768, "ROWS": c.rows, "BLOCK": c.block}
    yield "slot_dots", grouped_mm._dots_kernel, t, arguments, c


def _scan_cases(state_space):
    """The scan of Granite 4.0 Tiny (one group) with heads of 64 columns, and of 128."""
    pointers = ("x", "y", "dy", "dx", "keys", "queries", "states", "ends")
    wide = ("b", "dt", "ddt", "db", "skip", "dskip", "dkeys", "dqueries")
    given = {f"{n}_ptr": "*bf16" for n in pointers}
    given |= {f"{n}_ptr": "*fp32" for n in wide}
    given |= {f"{n}_ptr": "*fp32" for n in ("steps", "rates", "drates", "begin", "end", "out")}
    given |= {"rows": 1, "T": 16384, "H": 48, "shared": 48, "N": 128, "chunks": 256}
    given |= {f"{n}_row": 16384 * 3328 for n in ("x", "y", "keys", "queries")}
    given |= {f"{n}_token": 3328 for n in ("x", "y", "keys", "queries")}
    given |= {"HEADS": 16, "CHUNK": 64, "BACKWARDS": False, "HAS_BEGIN": True}
    given |= {"starts_ptr": "*i1", "HAS_STARTS": True, "part": 48 * 16384, "PARTS": 5}
    given |= {"CHUNKS": 64, "BLOCK": state_space.HEADS}
    by_heads = state_space.Config(block=state_space.HEADS, num_warps=4)
    for name in ("decays", "steps", "sums"):
        kernel = getattr(state_space, f"_{name}_kernel")
        yield f"scan_{name}", kernel, "fp32", {n: given[n] for n in kernel.arg_names}, by_heads
    for P in (64, 128):
        sizes = given | {"P": P, "BLOCK_P": P}
        for name, c in (
            ("states", state_space.STATES),
            *((name, state_space.config(name, P)) for name in state_space.NARROW),
        ):
            kernel = getattr(state_space, f"_{name}_kernel")
            arguments = sizes | {"BLOCK_N": c.block, "BLOCKS_N": 128 // c.block}
            arguments = {n: arguments[n] for n in kernel.arg_names}
            yield f"scan_{name} {P}", kernel, "bf16", arguments, c


def _compile(kernel, arguments: dict, config, arch: int):
    """The compiled kernel and what ptxas reports of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    signature, constants, divisible = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name.isupper() and name not in (
            "B",
            "C",
            "D",
            "F",
            "G",
            "H",
            "K",
            "L",
            "M",
            "N",
            "P",
            "T",
            "V",
        ):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, str):
            signature[name] = value
        else:
            signature[name] = "i32"
        if signature[name].startswith("*") or (signature[name] == "i32" and value % 16 == 0):
            divisible[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    options = {"num_warps": config.num_warps, "num_stages": 1, "maxnreg": config.maxnreg}
    options["enable_fp_fusion"] = config.fp_fusion
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(binary.asm["ptx"])
        target = re.search(r"\.target (\w+)", binary.asm["ptx"]).group(1)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={target}", str(ptx)]
        log = subprocess.run(
            [*command, "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True, check=True
        ).stderr
    return binary, log


def _main() -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    # ptxas runs once a kernel, for what it reports. What would be run is nobody's, and not kept
    # where others would find it (`reports`).
    CUDABackend.make_cubin = lambda *args: b"no binary"
    for name, kernel, dtype, arguments, config in _cases():
        # Hopper's alone: matrices of older GPUs' results fill more registers.
        for arch in (90,) if name.startswith(("delta_rule", "scan")) else TARGETS[dtype]:
            binary, log = _compile(kernel, arguments, config, arch)
            registers = int(re.search(r"Used (\d+) registers", log).group(1))
            spills = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
            row = {"name": name, "dtype": dtype, "arch": arch, "registers": registers}
            row |= {"spills": spills, "shared": binary.metadata.shared}
            inexact = re.findall(r"\b(?:fma\.|\w+\.approx|\w+[.\w]*\.ftz)[.\w]*", binary.asm["ptx"])
            wide = len(re.findall(r"(?:ld|st)\.global\.v4", binary.asm["ptx"]))
            print(json.dumps(row | {"inexact": sorted(set(inexact)), "wide": wide}))


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    cache = Path(environment.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    environment["TRITON_CACHE_DIR"] = str(cache / "longctx_ptx_alone")
    environment["PYTHONPATH"] = os.pathsep.join((PYTHONPATH, os.environ.get("PYTHONPATH", "")))
    result = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_every_kernel_compiles_for_both_architectures(reports):
    names = {"rms_norm_forward", "rms_norm_backward", "rope"}
    names |= {
        "interleaved_rope",
        "rope_rows",
        "rope_tables",
        "layer_norm_forward",
        "layer_norm_backward",
        *(f"{name}_{way}" for name, *_ in ACTIVATED for way in ("forward", "backward")),
        "cross_entropy",
        "cross_entropy_rows",
        "cross_entropy_gradient",
        *(
            f"{op}_{part}"
            for op in ("log_softmax", "divergence")
            for part in ("values", "gradient")
        ),
        "scale",
        "fp8",
        "fp8_bytes",
        "mxfp4",
        "nf4",
        "spread",
        "spread_factors",
        "places",
        "add_sinks",
        "sinks_grad",
        "grouped_mm",
        "grouped_mm_transposed",
        "grouped_mm_biased",
        "grouped_outer",
        "grouped_sum",
        "clamped_swiglu_forward",
        "clamped_swiglu_backward",
        *(f"{op}_{way}" for op in ("causal_conv", "gated_norm") for way in ("forward", "backward")),
        *(f"causal_conv_{way}_of_documents" for way in ("forward", "backward")),
        *(f"{op}{way}" for op in ("conv_heads", "delta_gates") for way in ("", "_gradient")),
        "combine",
        "count_slots",
        "place_slots",
        "slot_dots",
        "adamw",
        "many_adamw",
        "square_sums",
        "many_square_sums",
    }
    compiled = {(r["name"].split()[0], r["arch"], r["dtype"]) for r in reports}
    expected = {(n, a, t) for n in names for t, archs in TARGETS.items() for a in archs}
    in_16_bits = {"grouped_mm_adapted", "grouped_mm_adapted_widely"}
    expected |= {(n, a, "bf16") for n in in_16_bits for a in TARGETS["bf16"]}
    alone = {"delta_rule", *(f"scan_{n}" for n in ("states", "outputs", "inputs", "shared"))}
    expected |= {(f"scan_{name}", 90, "fp32") for name in ("decays", "steps", "sums")}
    assert compiled == expected | {(n, 90, "bf16") for n in alone}


def test_no_kernel_spills_registers(reports):
    for r in reports:
        assert r["spills"] == [0, 0], r
        assert r["shared"] <= SHARED_BYTES[r["arch"]], r


def test_adamw_and_norms_round_as_their_references_do(reports):
    """Each operation to nearest: no contraction, no approximation, no denormal flushed to zero."""
    exact = ("adamw", "many_adamw", "square_sums", "many_square_sums")
    assert [r["inexact"] for r in reports if r["name"] in exact] == [[]] * 12
    assert any("fma." in i for r in reports for i in r["inexact"])  # the search finds them


@pytest.mark.parametrize("name", ["adamw", "square_sums"])
def test_addresses_in_a_table_cost_no_wide_access(reports, name):
    """As many accesses have 16 bytes as where pointers are arguments."""
    wide = [[r["wide"] for r in reports if r["name"] == n] for n in (name, f"many_{name}")]
    assert wide[0] == wide[1] and all(wide[0])


if __name__ == "__main__":
    _main()
