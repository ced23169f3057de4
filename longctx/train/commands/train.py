"""Fine-tunes a model on long documents: text in, Hugging Face checkpoint out.

    longctx train                                        the built-in quick start, on any machine
    longctx train --model_name_or_path DIR --train_file data.jsonl --seq_len 131072
    accelerate launch -m longctx train ...               one of several processes
    python train.py ...                                  the same in a clone

`longctx train --help` lists every option (longctx/train/options/arguments.py documents them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from transformers import PretrainedConfig, set_seed

from longctx.errors import UserError, print_rank0
from longctx.images.room_for_images import ImageTokens, prepare
from longctx.train.data.rows import (
    as_arrays,
    build_dataset,
    check_sources,
    counts,
    document_names,
    image_files,
    images_of,
    pixels_identity,
    rows_identity,
)
from longctx.train.data.text.tokenizer import load_tokenizer
from longctx.train.data.text.trial import varies
from longctx.train.engines import check_resume
from longctx.train.engines.protocol import Engine
from longctx.train.loading.pretrained import read_config, weights_identity
from longctx.train.options.config import (
    DataArguments,
    ModelArguments,
    TrainArguments,
    explained_options,
)
from longctx.train.options.shipped import SHARE
from longctx.train.output import FINAL, checkpoint_step
from longctx.train.output.card import model_card
from longctx.train.output.definition import RunDefinition, check_same_run, define
from longctx.train.output.folder import (
    check_disk_space,
    check_output_dir,
    clear_output_dir,
    keep_images,
    lock_folder,
    open_output_dir,
)
from longctx.train.output.inputs import named_inputs
from longctx.train.output.record import Record
from longctx.train.output.resume import resolve_resume, resuming
from longctx.train.report.done import summarise
from longctx.train.report.example import numbered_images, show_example
from longctx.train.report.predicted import Foreseen, foresee
from longctx.train.report.sample import sample
from longctx.train.start.described import describe_run
from longctx.train.start.documents import needs_one_document
from longctx.train.start.image_batches import Batches, ImageCollator, RowsWithImages
from longctx.train.start.image_processor import (
    LazyProcessor,
    check_no_vision,
    check_shared_rows,
    processor_of,
    use_workers,
)
from longctx.train.start.loading import (
    check_request,
    compute_dtype,
    load_config,
    load_model,
    saved_bytes,
)
from longctx.train.start.options import check_layers, check_rows, check_towers, parse_args
from longctx.train.start.reference import References, check_reference
from longctx.train.start.teacher import check_teacher, load_teacher, teacher_identity
from longctx.train.start.trackers import tracked_as, tracked_name
from longctx.train.tasks import make_task
from longctx.train.tasks.protocol import Task
from longctx.train.trainer.callbacks import RunFile
from longctx.train.trainer.oom import explained_oom, explained_oom_of_weights
from longctx.train.trainer.trainer import LongTrainer

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
QUICKSTART = SHARE / "recipes/quickstart.yaml"


class Asked(NamedTuple):
    """Holds the parsed command line; `sources` are files of text, which a run must not delete."""

    argv: list[str] | None
    model: ModelArguments
    data: DataArguments
    train: TrainArguments
    engine: Engine
    task: Task
    sources: list[Path]
    resume: Path | None

    @property
    def options(self) -> tuple[ModelArguments, DataArguments, TrainArguments]:
        return self.model, self.data, self.train

    @property
    def first_step(self) -> int:
        """The steps that the checkpoint has behind it."""
        return (checkpoint_step(self.resume) or 0) if self.resume else 0


class Checked(NamedTuple):
    """Holds the tokenizer and the configurations, which are read before any weights, and what reads
    images if the model sees some."""

    tokenizer: Any
    config: PretrainedConfig
    teacher: PretrainedConfig | None
    lazy: LazyProcessor | None


class Folder(NamedTuple):
    """The output folder, which is this run's; one of several processes holds its lock."""

    path: Path
    lock: IO[bytes] | None
    foreseen: Foreseen | None


class Rows(NamedTuple):
    """The packed rows, and the names of the documents that are trained."""

    train: Any
    eval: Any
    names: Callable[[Iterable[int]], list[str]]
    images: Any = None
    """The processor, if there are images in the rows."""
    image_tokens: Sequence[ImageTokens] = ()
    """The tokens of images in the rows that are trained, and in those that are evaluated."""

    @property
    def given(self) -> dict[str, Any]:
        """The rows by what they are for; None for those that the run has not."""
        return {"train": self.train, "eval": self.eval}


def main(argv: list[str] | None = None) -> None:
    asked = read_options(argv)
    checked = check_models(asked)
    folder = None if asked.data.show_example else open_folder(asked, checked)
    rows = make_rows(asked, checked)
    if folder is None:
        if asked.train.process_index == 0:
            row = next(iter(rows.train))
            named = rows.names(row["documents"])
            images = None
            if rows.images:
                find = images_of(asked.data, asked.data.train_file, asked.task.rows)
                sources = find(row["documents"])
                images = numbered_images(row["input_ids"], rows.images, sources)
            show_example(row, named, checked.tokenizer, rows=asked.task.rows, images=images)
        return
    keep_read(asked, rows, folder)
    counted = {"train": counts(rows.train)}
    if rows.eval is not None:
        counted["eval"] = counts(rows.eval)
    batches = make_batches(asked, checked, rows)
    references, run = define_run(asked, checked, rows, batches)
    if folder.foreseen:
        folder.foreseen.show(rows.train, rows.image_tokens[0] if rows.image_tokens else None)
    rows = load_others(asked, checked, rows, references)
    trainer, record = load(asked, checked, rows, batches, references, run, counted)
    if asked.train.process_index == 0:
        clear_output_dir(folder.path, asked.resume)
    evaluated = train(asked, rows, folder, trainer, record)
    save(asked, rows, folder, trainer, record, evaluated)
    if folder.lock:
        folder.lock.close()
    asked.engine.shutdown(asked.train)


def read_options(argv: list[str] | None) -> Asked:
    """Flags and recipe, checked together, and the engine they ask for."""
    model_args, data_args, args, engine = parse_args(argv, default_recipe=QUICKSTART)
    task = make_task(args)
    sources = check_sources(data_args, task.rows)
    engine.start(args)
    resume = resolve_resume(args)
    check_resume(engine, args, resume)
    check_request(model_args, args.device)
    return Asked(argv, model_args, data_args, args, engine, task, sources, resume)


def check_models(asked: Asked) -> Checked:
    """Tokenizer and configurations: cheap, so a mismatch shows before any heavy work."""
    model_args, data_args, args = asked.options
    with args.main_process_first(desc="tokenizer"):
        if model_args.model_name_or_path:
            read_config(model_args.source)  # before its tokenizer, which would get the blame
        tokenizer = load_tokenizer(model_args, data_args)
    config = load_config(
        model_args,
        vocab_size=len(tokenizer),
        special_ids={name: getattr(tokenizer, name) for name in SPECIAL},
        rewards=args.task == "reward",
        engine=asked.engine,
    )
    check_towers(model_args, config, asked.engine, args.world_size)
    check_layers(model_args, args, config)
    teacher = None
    if args.task == "distill":
        teacher = check_teacher(model_args, args, config, tokenizer, asked.engine)
    if asked.task.has_reference and args.reference:
        check_reference(model_args, args, config)
    lazy = processor_of(model_args, data_args, asked.task, config, tokenizer)
    return Checked(tokenizer, config, teacher, lazy)


def open_folder(asked: Asked, checked: Checked) -> Folder:
    """The output folder is this run's, has room on its disk, and the run fits in memory."""
    model_args, _, args = asked.options
    path = open_output_dir(args)
    lock = lock_folder(path) if args.process_index == 0 else None
    inputs = named_inputs(asked.argv, *asked.options)
    check_output_dir(path, args, asked.resume, [*inputs, *asked.sources])
    copies = asked.engine.checkpoint_copies(args, compute_dtype(model_args, args.device))
    check_disk_space(path, saved_bytes(model_args, checked.config, args.device), copies, args)
    foreseen = foresee(model_args, args, checked.config, asked.engine)
    return Folder(path, lock, foreseen)


def make_rows(asked: Asked, checked: Checked) -> Rows:
    """Documents -> tokens -> packed rows of seq_len, or of one document each."""
    (model_args, data_args, args), task, config = asked.options, asked.task, checked.config
    lazy = checked.lazy
    one_document = needs_one_document(model_args, args, config, text=task.rows == "text")

    def build(files: list[str] | None, **of_evaluation: bool) -> Any:
        return build_dataset(
            data_args,
            checked.tokenizer,
            files=files,
            seq_len=model_args.seq_len,
            vocab_size=config.get_text_config().vocab_size,
            seed=args.seed,
            rows=task.rows,
            mismatched=task.mismatched,
            one_document=one_document,
            **of_evaluation,
            image_reading=None if lazy is None else lazy.image_reading(),
            config=config,
        )

    with args.main_process_first(desc="data"):
        train_rows, eval_rows = build(data_args.train_file), None
        if data_args.eval_share:
            eval_rows = build(data_args.train_file, held_out=True, evaluates=True)
        elif data_args.eval_file:
            eval_rows = build(data_args.eval_file, evaluates=True)
    check_rows(args, train_rows, eval_rows)
    with_images = lazy is not None
    names = document_names(data_args, data_args.train_file, task.rows, with_images=with_images)
    images = lazy and lazy.processor
    if images is None:
        check_no_vision(model_args, data_args)
        return Rows(train_rows, eval_rows, names)
    check_shared_rows(args, task, config)
    use_workers(args)
    counted = [ImageTokens.of(one, images) for one in (train_rows, eval_rows) if one is not None]
    return Rows(train_rows, eval_rows, names, images, counted)


def keep_read(asked: Asked, rows: Rows, folder: Folder) -> None:
    """Nothing that records name will be deleted."""
    data_args = asked.data
    if rows.images is not None:
        for files in (data_args.train_file, data_args.eval_file):
            if files or data_args.dataset_name:
                keep_images(folder.path, image_files(data_args, files, asked.task.rows))


def make_batches(asked: Asked, checked: Checked, rows: Rows) -> Batches:
    """How batches are made of the rows: those with images get pixels."""
    (model_args, data_args, args), task = asked.options, asked.task
    with_images = rows.images is not None
    collate = task.collator(model_args.class_type, alone=with_images)
    if not with_images:
        return Batches(collate, lambda what, given: as_arrays(given), with_images)
    files = {"train": data_args.train_file, "eval": data_args.eval_file or data_args.train_file}

    def read(what: str, given: Any) -> Any:
        return RowsWithImages(given, images_of(data_args, files[what], task.rows))

    dtype = compute_dtype(model_args, args.device)
    return Batches(ImageCollator(rows.images, checked.config, dtype, collate), read, with_images)


def define_run(
    asked: Asked, checked: Checked, rows: Rows, batches: Batches
) -> tuple[References | None, RunDefinition]:
    """Returns what defines this run. Raises UserError if the checkpoint is of another one."""
    (model_args, data_args, args), teacher = asked.options, checked.teacher
    references = None
    if asked.task.has_reference:
        references = References(asked.task, *asked.options, checked.config, rows.names, batches)
    adapters = model_args.lora_r is not None
    run = define(
        [*asked.options, args.accelerator_config],
        dtype=compute_dtype(model_args, args.device),
        data=rows_identity(data_args, rows.train),
        model=checked.config.to_dict(),
        num_processes=args.world_size,
        base=weights_identity(model_args.source, checked.config) if adapters else None,
        reference=references.identity if references else None,
        images=pixels_identity(rows.train, rows.images) if rows.images else None,
        teacher=teacher_identity(model_args, args, teacher) if teacher is not None else None,
    )
    check_same_run(
        *(asked.resume, run, args.allow_changed or [], asked.engine.keeps_options),
        tokens_vary=asked.resume is not None and varies(checked.tokenizer),
    )
    if asked.resume:
        print_rank0(resuming(asked.resume))
    return references, run


def load_others(asked: Asked, checked: Checked, rows: Rows, references: References | None) -> Rows:
    """Other models that the task needs: a reference is loaded alone, gives the rows its numbers and
    is gone before training; a teacher stays."""
    if references and asked.train.reference:
        rows = rows._replace(**references.of_another_model(rows.given, asked.engine))
    if checked.teacher is not None:
        asked.task.teacher = load_teacher(asked.model, asked.train, checked.teacher)
    return rows


def load(
    asked: Asked,
    checked: Checked,
    rows: Rows,
    batches: Batches,
    references: References | None,
    run: RunDefinition,
    counted: dict[str, dict[str, int]],
) -> tuple[LongTrainer, Record]:
    """The model, vanilla, liger or custom, whose random weights depend on the seed alone; its
    trainer; and the record of the run."""
    (model_args, _, args), engine, resumed = asked.options, asked.engine, asked.resume is not None
    set_seed(args.seed)
    with explained_oom_of_weights(engine, model_args):
        with_images = rows.images is not None
        of_model: dict[str, Any] = dict(device=args.device, engine=engine, with_images=with_images)
        model = load_model(model_args, checked.config, **of_model)
        with explained_options("these options"):
            trainer = LongTrainer(
                model=model,
                args=args,
                engine=engine,
                seq_len=model_args.seq_len,
                host_memory_gib=model_args.host_memory_gib,
                train_dataset=batches.read("train", rows.train),
                eval_dataset=rows.eval and batches.read("eval", rows.eval),
                data_collator=batches.collate,
                task=asked.task,
                processing_class=checked.tokenizer,
                document_names=rows.names,
                run=run,
            )
        if rows.images and trainer.runtime:
            rows_a_batch = args.per_device_train_batch_size
            prepare(trainer.model, trainer.runtime, rows.image_tokens, rows_a_batch)
        trainer.place(asked.resume)
        if references and not args.reference:
            references.of_the_start(trainer, rows.given, resumed=resumed)
        record = describe_run(
            asked.argv,
            *asked.options,
            model=trainer.model,
            counted=counted,
            step=asked.first_step,
        )
        record["tracked_as"] = tracked_name(args, resumed=resumed)
        trainer.add_callback(RunFile(record, resumed=resumed))
    return trainer, record


def train(
    asked: Asked, rows: Rows, folder: Folder, trainer: LongTrainer, record: Record
) -> Mapping[str, float]:
    """Trains, and evaluates what was trained."""
    with explained_oom(trainer, asked.model), tracked_as(record["tracked_as"], trainer):
        trainer.train(resume_from_checkpoint=str(asked.resume) if asked.resume else None)
        if not trainer.state.global_step:
            raise UserError("no step was trained: the data gave no batch")
        if trainer.state.global_step == asked.first_step:
            print_rank0(f"{asked.resume} is where this run ends: nothing was left to train")
        elif folder.foreseen:
            folder.foreseen.compare(trainer, first_step=asked.first_step)
        return trainer.evaluate_final() if rows.eval is not None else {}


def save(
    asked: Asked,
    rows: Rows,
    folder: Folder,
    trainer: LongTrainer,
    record: Record,
    evaluated: Mapping[str, float],
) -> None:
    """Saves what `from_pretrained` loads, and says what happened."""
    trainer.save_final(folder.path / FINAL, model_card(record, trainer.state.log_history))
    if trainer.is_world_process_zero():
        goes_on = sample(trainer, rows.train if rows.eval is None else rows.eval)
        summarise(trainer, *asked.options, folder.path, evaluated, goes_on)
