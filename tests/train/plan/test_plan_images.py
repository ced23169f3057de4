"""Plans of rows with images."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longctx.cost.named import machine_named
from longctx.cost.peak import peak
from longctx.errors import UserError
from longctx.images.image_sizes import image_of
from longctx.train.options.config import ModelArguments
from longctx.train.options.written import MOST_PIXELS, pixels_of
from longctx.train.plan.predict import longest, plan
from longctx.train.plan.subject import PlannedRun, Subject
from longctx.train.plan.written_plan import read_given
from longctx.train.report.plan import main
from longctx.train.start.loading import load_config

HOST = 200 << 30
H100 = machine_named("h100")
WORDS = ["--preset", "qwen3-vl-8b", "--gpu", "h100", "--host_memory_gib", "200", "--lora_r", "16"]
IMAGES = ["--images", "128", "--image_pixels", "448x448", "--seq_len", "32768"]


def made(**options: Any) -> tuple[Subject, PlannedRun]:
    place = options.pop("place", "auto")
    args = ModelArguments(preset="qwen3-vl-8b", **dict(seq_len=32768, lora_r=16) | options)
    return Subject(load_config(args, vocab_size=1), args), PlannedRun(model=args, place=place)


def with_images(run: PlannedRun, subject: Subject, count: int) -> PlannedRun:
    return run.having(images=count, image=image_of(subject.whole, (448, 448)))


def test_images_take_memory_in_every_phase_and_time_of_their_own() -> None:
    subject, run = made(place="gpu")
    text = plan(subject, run, H100, HOST)
    seen = plan(subject, with_images(run, subject, 128), H100, HOST)
    assert text.fits and seen.fits and text.images is None and seen.images is not None
    assert text.seconds.images == 0 < 0.4 < seen.seconds.images < 0.8
    assert [phase.name for phase in seen.phases] == ["images", *(p.name for p in text.phases)]
    for phase in seen.phases:
        assert phase.buffers["vision tower"] == 2 * 576_388_336
        assert phase.buffers["pixels"] == 2 * 128 * 784 * 1536
        assert phase.groups["images"] > phase.buffers["pixels"]
    assert all(not phase.groups["images"] for phase in text.phases)
    assert peak(seen.phases).nbytes <= seen.gpu_limit
    # lm_head computes nothing for tokens without labels
    assert seen.seconds.products < text.seconds.products


def test_passes_and_rows_count_images_as_often() -> None:
    subject, run = made(seq_len=4096)
    run = with_images(run, subject, 16)
    once = plan(subject, run, H100, HOST)
    twice = plan(subject, run.having(gradient_accumulation_steps=2), H100, HOST)
    assert twice.seconds.images == pytest.approx(2 * once.seconds.images)
    rows = plan(subject, run.having(per_device_train_batch_size=2), H100, HOST)
    assert rows.images is not None and rows.images.count == 32


def test_a_tower_that_trains_has_gradients_and_states() -> None:
    """576M parameters in bf16 with 10 bytes of states each, on the GPU, and gradients that come
    after all layers'."""
    frozen, run = made(seq_len=8192, lora_r=None)
    trained, run_trained = made(seq_len=8192, lora_r=None, train_vision=True)
    a = plan(frozen, with_images(run, frozen, 32), H100, HOST)
    b = plan(trained, with_images(run_trained, trained, 32), H100, HOST)
    (block,) = (s for s in b.decision.specs if s.name == "vision tower")
    sizes = block.sizes(accumulates=False)
    assert sizes.first and sizes.states == pytest.approx(10 * 576_388_336, rel=1e-3)
    names = [phase.name for phase in b.phases]
    assert names[-2:] == ["images' gradients", "update"]
    at = {phase.name: phase.buffers["gradients"] for phase in b.phases}
    assert at["images' gradients"] - at["backward"] >= 2 * 576_388_336
    assert b.seconds.images > 3 * a.seconds.images
    (block,) = (s for s in a.decision.specs if s.name == "vision tower")
    assert block.tower and not block.trained


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_frozen_tower_waits_on_the_host_where_memory_is_short(quantize: str) -> None:
    """Then its 1.07 GiB are on the GPU in the tower's phase alone, and come over the link while
    nothing computes."""
    subject, run = made(quantize=quantize)
    run = with_images(run.having(gpu_memory_gib=7.2), subject, 128)
    found = plan(subject, run, H100, HOST)
    assert found.fits and found.images is not None and found.images.away
    held = {phase.name: phase.buffers["vision tower"] for phase in found.phases}
    assert held.pop("images") == 2 * 576_388_336 and {*held.values()} == {0}
    stays = plan(subject, run.having(place="gpu"), H100, HOST)
    assert not stays.fits and stays.images is not None and not stays.images.away
    sizes = [spec.sizes(accumulates=False) for spec in found.decision.specs]
    of_towers = next(i for i, size in enumerate(sizes) if size.tower)
    traffic = found.decision.chosen.traffic
    for rising in (traffic.rising_first[0], traffic.rising[0]):
        assert rising[of_towers] - rising[of_towers - 1] == sizes[of_towers].weight
    assert sizes[of_towers].weight == pytest.approx(2 * 576_388_336, rel=1e-3)
    assert found.seconds.waits > sizes[of_towers].weight / H100.link_bytes


def test_all_of_it_waits_where_that_is_asked_for() -> None:
    subject, run = made()
    text = plan(subject, run.having(place="host"), H100, HOST)
    found = plan(subject, with_images(run.having(place="host"), subject, 128), H100, HOST)
    assert found.images is not None and found.images.away
    assert len(found.decision.specs) == len(text.decision.specs) + 1
    several = plan(subject, with_images(run.having(gpus=2), subject, 128), H100, HOST)
    assert several.images is not None and not several.images.away


def test_adapters_train_on_a_tower_as_in_a_run() -> None:
    subject, run = made(seq_len=8192, train_vision=True)
    found = plan(subject, with_images(run, subject, 32), H100, HOST)
    (block,) = (s for s in found.decision.specs if s.name == "vision tower")
    assert {p.shape[0] for name, p in block.parameters.items() if "lora_A" in name} == {16}
    assert all("lora" in name for name, p in block.parameters.items())


def test_the_longest_row_has_room_for_its_images() -> None:
    subject, run = made()
    run = with_images(run, subject, 128)
    assert run.image_tokens == 128 * 198
    assert longest(subject, run, H100, HOST, most=25000) is None
    found = longest(subject, run, H100, HOST, most=27000)
    assert found is not None and found.run.model.seq_len == 26624


def result(capsys: Any, *words: str) -> dict[str, Any]:
    main([*WORDS, "--json", *words])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_and_text(capsys) -> None:
    found = result(capsys, *IMAGES)
    shown = found["images"]
    assert (shown["in_a_row"], shown["patches"], shown["tokens"]) == (128, 784, 198)
    assert shown["row_tokens"] == 25344 and not shown["trained"] and shown["in_a_group"] == 10
    assert shown["tower_gib"] == pytest.approx(1.074, abs=1e-3)
    assert found["step_s"] == pytest.approx(sum(found["parts_s"].values()), rel=0.005)
    assert found["parts_s"]["images"] > 0.4
    assert found["phases"][0]["phase"] == "images" and not shown["tower_on_host"]
    main([*WORDS, *IMAGES])
    text = " ".join(capsys.readouterr().out.split())
    assert "128 of 448 x 448 in a row, 784 patches and 198 tokens each, 25344 tokens in all" in text
    assert "the vision tower is frozen" in text and ", images 0." in text
    assert "images" not in result(capsys, "--seq_len", "8192")
    assert result(capsys, *IMAGES, "--place", "host")["images"]["tower_on_host"]
    main([*WORDS, *IMAGES, "--place", "host"])
    text = " ".join(capsys.readouterr().out.split())
    assert "the vision tower is frozen and waits on the host while it does not run" in text


@pytest.mark.parametrize("place", ["gpu", "host"])
def test_a_written_plan_says_where_the_tower_is(place, capsys, tmp_path) -> None:
    """Blocks of text alone are placed as before: a run of rows without images has no others."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(result(capsys, *IMAGES, "--place", place)))
    given = read_given(path)
    assert given.tower_on_gpu == (place == "gpu")
    subject, run = made(place=place)
    found = plan(subject, with_images(run, subject, 128), H100, HOST)
    assert given.places_of(found.decision.specs) == found.decision.places
    text = plan(subject, run, H100, HOST)
    assert given.places_of(text.decision.specs) == [*given.places]


def test_a_written_plan_says_how_many_images_it_has(capsys, tmp_path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(result(capsys, *IMAGES)))
    seen = read_given(path)
    assert seen.images == (128, 448, 448, 196) and seen.fewer_images(128 * 196) is None
    assert seen.fewer_images(128 * 196 + 1) == (
        f"--plan {path} is of rows with 128 images of 448 x 448, 25088 tokens, and one here has "
        "25089 tokens of images: what these take must be free beside the plan; more --images would "
        "plan for them"
    )
    subject, run = made()
    seen.check(run, subject.sizes(run))  # of a run that has read no rows
    subject, run = made(train_vision=True)
    with pytest.raises(UserError, match="--train_vision False, and this one has --train_vision T"):
        seen.check(run, subject.sizes(run))
    written = json.loads(path.read_text())
    for damaged in ([], {"in_a_row": 1}, {**written["plan"]["images"], "features": 0}):
        written["plan"]["images"] = damaged
        path.write_text(json.dumps(written))
        with pytest.raises(UserError, match="is no plan"):
            read_given(path)
    for name in ("images", "cuda_graphs"):  # as an earlier version wrote it
        del written["plan"][name]
    del written["plan"]["run"]["train_vision"]
    path.write_text(json.dumps(written))
    found = read_given(path)
    assert found.images is None and found.fewer_images(0) is None
    assert "is of rows with no images and one here has 7 tokens" in str(found.fewer_images(7))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*IMAGES, "--images", "256"], "50688 tokens, 198 each, and --seq_len is 32768: raise it"),
        ([*IMAGES, "--images", "0"], "--images must be at least 1, got 0"),
        ([*IMAGES, "--images", "-3"], "--images must be at least 1, got -3"),
        ([*IMAGES, "--preset", "qwen3-8b"], "qwen3-8b reads text alone"),
        ([*IMAGES, "--class_type", "vanilla"], "knows images with --class_type custom"),
        (["--images", "4"], "say which with --image_pixels, as 448x448"),
        (["--train_vision"], "say how many a row has with --images"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        main([*WORDS, *words])


def test_pixels() -> None:
    assert pixels_of("448x336") == (448, 336) and pixels_of("448") == (448, 448)
    assert pixels_of(f"1X{MOST_PIXELS}") == (1, MOST_PIXELS)
    for wrong in ("0", "448x0", "", "x", "448x", "1x2x3", "4.5", "-3", "16385", "9" * 30, "٣x٣"):
        with pytest.raises(UserError, match="--image_pixels"):
            pixels_of(wrong)
