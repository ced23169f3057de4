"""Routers against those of transformers, in fp64, and the gradients of logits against autograd.

transformers' routers and its balance loss compute in fp32 by name. Where `in_fp64` is asked for,
those names mean fp64, so that a difference of 1e-12 is seen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from exactness import DEVICE
from longctx.layer.router import Router, balance_loss, balance_sums, logits_grad, route, weights_of

E, K, D, T = 12, 3, 16, 40


@pytest.fixture
def in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


# --- against transformers --------------------------------------------------------------------


def _mixtral(config: Any) -> dict[str, Any]:
    return {}


def _qwen(config: Any) -> dict[str, Any]:
    return dict(normalised=config.norm_topk_prob)


def _of_logits(config: Any) -> dict[str, Any]:
    return dict(over="logits")


def _ernie(config: Any) -> dict[str, Any]:
    return dict(floor=config.moe_norm_min)


def _deepseek(config: Any) -> dict[str, Any]:
    return dict(
        score="sigmoid",
        normalised=config.norm_topk_prob,
        floor=1e-20,
        scaling=config.routed_scaling_factor,
        groups=config.n_group,
        chosen_groups=config.topk_group,
    )


FAMILIES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "mixtral": ("MixtralTopKRouter", _mixtral),
    "qwen2_moe": ("Qwen2MoeTopKRouter", _qwen),
    "qwen3_moe": ("Qwen3MoeTopKRouter", _qwen),
    "olmoe": ("OlmoeTopKRouter", _qwen),
    "gpt_oss": ("GptOssTopKRouter", _of_logits),
    "granitemoe": ("GraniteMoeTopKRouter", _of_logits),
    "ernie4_5_moe": ("Ernie4_5_MoeTopKRouter", _ernie),
    "glm4_moe": ("Glm4MoeTopkRouter", _deepseek),
    "deepseek_v3": ("DeepseekV3TopkRouter", _deepseek),
}
"""model_type -> the class of its router, and how it differs from Mixtral's."""

GROUPS = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5)
CASES = [
    ("mixtral", {}),
    *((name, {"norm_topk_prob": on}) for name in list(FAMILIES)[1:4] for on in (True, False)),
    ("gpt_oss", {}),
    ("granitemoe", {}),
    ("ernie4_5_moe", {}),
    ("ernie4_5_moe", {"moe_norm_min": 0.5}),  # many sums are below it
    ("glm4_moe", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}),
    ("glm4_moe", GROUPS),
    ("glm4_moe", {**GROUPS, "norm_topk_prob": False}),
    ("deepseek_v3", GROUPS),
]


def router_of(config: Any) -> Router:
    """Returns the router of a configuration of transformers."""
    _, differs = FAMILIES[config.model_type]
    return Router(
        experts=getattr(config, "num_local_experts", None) or config.num_experts,
        chosen=config.num_experts_per_tok,
        **differs(config),
    )


def of_transformers(name: str, changes: dict[str, Any]) -> tuple[Any, Router, Tensor | None]:
    """A family's router with random parameters, ours, and the bias of the choice."""
    sizes = {key: E for key in ("num_experts", "num_local_experts", "n_routed_experts")}
    config = AutoConfig.for_model(
        name, hidden_size=D, num_experts_per_tok=K, **{**sizes, **changes}
    )
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    theirs = getattr(module, FAMILIES[name][0])(config).double().to(DEVICE)
    bias = None
    for seed, (key, value) in enumerate([*theirs.named_parameters(), *theirs.named_buffers()]):
        value.data.copy_(0.5 * made(*value.shape, seed=seed))
        if "e_score" in key:  # which may change the choice, not all of it
            bias = value.data.mul_(0.4).flatten()
    return theirs, router_of(config), bias


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_ids_weights_and_gradients_of_transformers(name, changes) -> None:
    theirs, router, bias = of_transformers(name, changes)
    found = theirs(made(T, D, seed=9))  # GraniteMoe's in another order before transformers 5.23
    logits, weights, ids = sorted(found, key=lambda x: (not x.is_floating_point(), x.shape[1] < E))
    ours = route(logits.detach(), router, bias)
    order, his_order = ours.ids.argsort(-1), ids.argsort(-1)  # GLM-4 does not sort
    assert torch.equal(ours.ids.gather(-1, order).long(), ids.gather(-1, his_order))
    close(ours.weights.gather(-1, order), weights.gather(-1, his_order).detach())
    if bias is not None:  # it decides some choices
        assert not torch.equal(ours.ids, route(logits.detach(), router).ids)

    dw = made(T, K, seed=10)
    (truth,) = torch.autograd.grad(weights, logits, dw)
    close(logits_grad(logits.detach(), router, ids, dw), truth)


# --- alone -----------------------------------------------------------------------------------

ROUTERS = {
    "mixtral": Router(experts=E, chosen=K),
    "plain": Router(experts=E, chosen=K, normalised=False, scaling=0.7),
    "floor": Router(experts=E, chosen=K, floor=0.6),
    "logits": Router(experts=E, chosen=K, over="logits", scaling=1.7),
    "sigmoid": Router(experts=E, chosen=K, score="sigmoid", floor=1e-20, scaling=2.5),
    "sigmoid-plain": Router(experts=E, chosen=K, score="sigmoid", normalised=False),
    "top-1": Router(experts=E, chosen=1),
    "top-1-plain": Router(experts=E, chosen=1, normalised=False),
    "all": Router(experts=E, chosen=E),
    "all-plain": Router(experts=E, chosen=E, normalised=False),
    "groups": Router(experts=E, chosen=4, groups=6, chosen_groups=2),
    "one-expert": Router(experts=1, chosen=1),
}


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_the_gradient_is_autograd_s(name: str, balanced: bool) -> None:
    """Also with ids that are not the best ones, and with tokens that count 0, 1 or 3 times."""
    router = ROUTERS[name]
    logits = made(T, router.experts).requires_grad_()
    ids = made(T, router.experts, seed=1).argsort(-1)[:, : router.chosen]
    dw, dp = made(T, router.chosen, seed=2), made(router.experts, seed=3)
    times = torch.tensor([0, 1, 3, 1], device=DEVICE).repeat(T // 4)
    loss = (weights_of(logits, router, ids) * dw).sum()
    if balanced:
        loss = loss + (times.unsqueeze(-1) * logits.softmax(-1) * dp).sum()
    (truth,) = torch.autograd.grad(loss, logits)
    beside = (dp, times) if balanced else ()
    close(logits_grad(logits.detach(), router, ids, dw, *beside), truth)


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_are_those_of_topk(name: str) -> None:
    router = ROUTERS[name]
    logits = made(T, router.experts).round()
    logits[0] = 0  # all are the same
    values = torch.softmax(logits, -1) if router.score == "softmax" else torch.sigmoid(logits)
    ids, weights = route(logits, router)
    if router.groups == 1:
        values = logits if router.over == "logits" else values
        assert torch.equal(ids.long(), values.topk(router.chosen).indices)
    assert all(len({*row}) == router.chosen for row in ids.tolist())
    assert logits_grad(logits, router, ids, weights).isfinite().all()
    assert (weights[0] == weights[0, 0]).all() and weights.isfinite().all()


def test_logits_differ_where_their_scores_are_ties() -> None:
    """In fp32 all scores but the first are zero, wherever the second largest logit is."""
    logits = torch.full((E - 1, E), -300.0, device=DEVICE)
    logits[:, 0], second = 0, torch.arange(1, E, device=DEVICE)
    logits[:, 1:].fill_diagonal_(-200)
    of_scores, of_logits = (
        route(logits, Router(experts=E, chosen=2, over=over)).ids for over in ("scores", "logits")
    )
    assert torch.equal(of_logits[:, 1].long(), second)
    assert (of_scores[:, 1] == of_scores[0, 1]).all()


def test_a_token_stays_in_its_groups() -> None:
    router = ROUTERS["groups"]
    groups = route(made(T, E), router).ids // (E // router.groups)
    assert all(len({*row}) <= router.chosen_groups for row in groups.tolist())


def test_all_experts_and_one_expert() -> None:
    logits = made(T, E)
    ids, weights = route(logits, ROUTERS["all"])
    assert torch.equal(ids.sort().values.long(), torch.arange(E, device=DEVICE).expand(T, E))
    close(weights, logits.softmax(-1).sort(descending=True).values)
    one = ROUTERS["one-expert"]
    ids, weights = route(made(T, 1), one)
    assert (ids == 0).all() and (weights == 1).all()
    assert (logits_grad(made(T, 1), one, ids, made(T, 1, seed=1)) == 0).all()


def test_an_expert_that_nobody_chooses() -> None:
    """A normalised softmax gives it no gradient; its own probability does."""
    logits = made(T, E)
    logits[:, 5] = -30
    ids, _ = route(logits, ROUTERS["mixtral"])
    dw, dp = made(T, K, seed=2), made(E, seed=3)
    assert (ids != 5).all() and balance_sums(logits, ROUTERS["mixtral"])[1, 5] == 0
    assert (logits_grad(logits, ROUTERS["mixtral"], ids, dw)[:, 5] == 0).all()
    for name, beside in (("plain", ()), ("mixtral", (dp,))):
        assert (logits_grad(logits, ROUTERS[name], ids, dw, *beside)[:, 5] != 0).all()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_given_ids_replace_the_choice(dtype: torch.dtype) -> None:
    logits = made(T, E, dtype=torch.float32)
    own = route(logits, ROUTERS["plain"])
    assert (own.ids.dtype, own.weights.dtype) == (torch.int16, torch.float32)
    again = route(logits, ROUTERS["plain"], ids=own.ids.to(dtype))
    other = route(logits, ROUTERS["plain"], ids=(own.ids.to(dtype) + 1) % E)
    assert torch.equal(own.ids, again.ids) and torch.equal(own.weights, again.weights)
    assert other.ids.dtype == torch.int16 and (other.ids == (own.ids + 1) % E).all()
    scores = 0.7 * logits.softmax(-1)
    torch.testing.assert_close(other.weights, scores.gather(-1, other.ids.long()))


def test_improbable_experts_have_weights() -> None:
    """All probabilities of the given ids are zero in fp32, and their quotients are not."""
    logits = torch.tensor([[0.0, -200.0, -201.0, -400.0]], device=DEVICE)
    router, ids = Router(experts=4, chosen=2), torch.tensor([[1, 2]], device=DEVICE)
    assert (logits.softmax(-1)[0, 1:] == 0).all()
    _, weights = route(logits, router, ids=ids)
    torch.testing.assert_close(weights, logits.new_tensor([[0.0, -1.0]]).softmax(-1))
    dlogits = logits_grad(logits, router, ids, logits.new_tensor([[1.0, 0.0]]))
    slope = weights[0, 0] * weights[0, 1]
    torch.testing.assert_close(dlogits, slope * logits.new_tensor([[0.0, 1.0, -1.0, 0.0]]))


@pytest.mark.parametrize("low", [-25.0, -20.0, 0.0])
def test_a_floor_has_the_bits_of_an_epsilon(low: float) -> None:
    """GLM-4 and DeepSeek-V3 divide by sum + 1e-20. At -25 the sums are about 1e-11."""
    logits = low + made(T, E, dtype=torch.float32)
    ids, weights = route(logits, ROUTERS["sigmoid"])
    s = logits.sigmoid().gather(-1, ids.long())
    assert torch.equal(weights, 2.5 * (s / (s.sum(-1, keepdim=True) + 1e-20)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(chosen=0), "not to 0 of 12"),
        (dict(chosen=13), "not to 13 of 12"),
        (dict(experts=2**15 + 1), "at most 32768 experts"),
        (dict(groups=5), "not 5 of 12"),
        (dict(groups=12), "at least 2"),
        (dict(groups=6, chosen_groups=1), "1 of 6 groups of 2 experts do not hold the 3"),
        (dict(groups=6, chosen_groups=7), "7 of 6 groups"),
    ],
)
def test_numbers_that_no_router_has(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Router(**{"experts": E, "chosen": K, **changes})


# --- the auxiliary loss ----------------------------------------------------------------------

L, ROWS = 3, 4
MASK = torch.arange(T // ROWS) < torch.tensor([[10], [7], [4], [1]])
"""Rows of 10 tokens, padded behind."""


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
@pytest.mark.parametrize("k", [1, 3, E])
def test_the_balance_loss_of_transformers(family: str, masked: bool, k: int) -> None:
    """Several layers, each in two tiles; the gradient of the logits comes back through sums."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    layers = [made(T, E, seed=seed).requires_grad_() for seed in range(L)]
    mask = MASK.to(DEVICE) if masked else None
    truth = module.load_balancing_loss_func(tuple(layers), E, k, mask)
    truths = torch.autograd.grad(truth, layers)

    router = Router(experts=E, chosen=k)
    times = None if mask is None else mask.flatten()
    tokens = T if times is None else times.sum()
    assert not masked or tokens < T
    tiles = (slice(0, 17), slice(17, T))
    sums = torch.stack(
        [
            sum(
                balance_sums(x.detach()[tile], router, None if times is None else times[tile])
                for tile in tiles
            )
            for x in layers
        ]
    ).requires_grad_()
    loss = balance_loss(sums, tokens, router)
    close(loss, truth)
    (d_sums,) = torch.autograd.grad(loss, sums)
    assert (d_sums[:, 1] == 0).all()
    no_dw = torch.zeros(T, k, dtype=torch.float64, device=DEVICE)
    for x, (dp, _), expected in zip(layers, d_sums, truths, strict=True):
        ids = route(x.detach(), router).ids
        close(logits_grad(x.detach(), router, ids, no_dw, dp, times), expected)


@pytest.mark.parametrize("name", ["sigmoid", "logits", "floor", "plain"])
def test_balance_asks_for_no_more_than_logits_and_k(name: str) -> None:
    logits = made(T, E)
    ours, mixtral = (balance_sums(logits, ROUTERS[which]) for which in (name, "mixtral"))
    assert torch.equal(ours, mixtral)


def test_a_shared_prompt_counts_as_often_as_it_has_answers() -> None:
    logits, router = made(T, E), ROUTERS["sigmoid"]
    times = torch.ones(T, dtype=torch.int64, device=DEVICE)
    times[:10] = 3
    repeated = balance_sums(logits.repeat_interleave(times, 0), router)
    close(balance_sums(logits, router, times), repeated)
    close(repeated.sum(-1), repeated.new_tensor([T + 20, K * (T + 20)]))


# --- the host --------------------------------------------------------------------------------


def _everything(router: Router, device: str) -> None:
    logits = torch.zeros(T, E, device=device)
    bias, times = torch.zeros(E, device=device), torch.ones(T, device=device)
    ids, weights = route(logits, router, bias)
    sums = balance_sums(logits, router, times)[None].requires_grad_()
    (d_sums,) = torch.autograd.grad(balance_loss(sums, times.sum(), router), sums)
    logits_grad(logits, router, ids, weights, d_sums[0, 0], times)


@pytest.mark.parametrize("name", [name for name in ROUTERS if name != "one-expert"])
def test_no_number_is_needed_on_the_host(name: str) -> None:
    """Tensors on `meta` have no numbers: to read one raises an error."""
    _everything(ROUTERS[name], "meta")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in ROUTERS if name != "one-expert"])
def test_the_host_does_not_wait(name: str) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        _everything(ROUTERS[name], "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
