"""Fine-tunes a model on long documents: text in, Hugging Face checkpoint out.

    longctx train                                        the built-in quick start, on any machine
    longctx train --model_name_or_path DIR --train_file data.jsonl --seq_len 131072
    accelerate launch -m longctx train ...               one of several processes
    python train.py ...                                  the same in a clone

`longctx train --help` lists every option (longctx/config.py documents them).
"""

from __future__ import annotations

from transformers import set_seed

from longctx.config import explained_options
from longctx.data.rows import (
    as_arrays,
    build_dataset,
    check_sources,
    counts,
    document_names,
    rows_identity,
)
from longctx.data.tokenizer import load_tokenizer
from longctx.data.trial import varies
from longctx.engines import check_resume
from longctx.errors import UserError, print_rank0
from longctx.model.pretrained import read_config, weights_identity
from longctx.output import FINAL, checkpoint_step
from longctx.output.card import model_card
from longctx.output.definition import check_same_run, define
from longctx.output.folder import (
    check_disk_space,
    check_output_dir,
    clear_output_dir,
    lock_folder,
    open_output_dir,
)
from longctx.output.inputs import named_inputs
from longctx.output.resume import resolve_resume, resuming
from longctx.report.done import summarise
from longctx.report.example import show_example
from longctx.report.predicted import foresee
from longctx.report.sample import sample
from longctx.run.callbacks import RunFile
from longctx.run.described import describe_run
from longctx.run.documents import needs_one_document
from longctx.run.loading import (
    check_request,
    compute_dtype,
    load_config,
    load_model,
    saved_bytes,
)
from longctx.run.oom import explained_oom, explained_oom_of_weights
from longctx.run.options import check_layers, check_rows, check_towers, parse_args
from longctx.run.reference import References, check_reference
from longctx.run.teacher import check_teacher, load_teacher, teacher_identity
from longctx.run.trackers import tracked_as, tracked_name
from longctx.run.trainer import LongTrainer
from longctx.shipped import SHARE
from longctx.tasks import make_task

SPECIAL = ("bos", "eos", "pad")
QUICKSTART = SHARE / "recipes/quickstart.yaml"


def main(argv: list[str] | None = None) -> None:
    # 1. Options: flags and recipe, checked together, and the engine they ask for.
    model_args, data_args, args, engine = parse_args(argv, default_recipe=QUICKSTART)
    task = make_task(args)
    sources = check_sources(data_args, task.rows)
    engine.start(args)
    resume = resolve_resume(args)
    check_resume(engine, args, resume)
    check_request(model_args, args.device)

    # 2. Tokenizer and configuration: cheap, so a mismatch shows before any heavy work.
    with args.main_process_first(desc="tokenizer"):
        if model_args.model_name_or_path:
            read_config(model_args.source)  # before its tokenizer, which would get the blame
        tokenizer = load_tokenizer(model_args, data_args)
    special_ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL}
    config = load_config(
        model_args,
        vocab_size=len(tokenizer),
        special_ids=special_ids,
        rewards=args.task == "reward",
    )
    check_towers(config, engine, args.world_size)
    check_layers(model_args, args, config)
    teacher = None
    if args.task == "distill":
        teacher = check_teacher(model_args, args, config, tokenizer, engine)
    if task.has_reference and args.reference:
        check_reference(model_args, args, config)
    if not data_args.show_example:  # which writes nothing there
        output_dir = open_output_dir(args)
        lock = lock_folder(output_dir) if args.process_index == 0 else None
        inputs = named_inputs(argv, model_args, data_args, args)
        check_output_dir(output_dir, args, resume, [*inputs, *sources])
        dtype = compute_dtype(model_args, args.device)
        size_bytes = saved_bytes(model_args, config, args.device)
        check_disk_space(output_dir, size_bytes, engine.checkpoint_copies(args, dtype), args)
        foreseen = foresee(model_args, args, config, engine)

    # 3. Data: documents -> tokens -> packed rows of seq_len, or of one document each.
    one_document = needs_one_document(model_args, args, config, text=task.rows == "text")

    def rows(files: list[str] | None):
        return build_dataset(
            data_args,
            tokenizer,
            files=files,
            seq_len=model_args.seq_len,
            vocab_size=config.get_text_config().vocab_size,
            seed=args.seed,
            rows=task.rows,
            mismatched=task.mismatched,
            one_document=one_document,
        )

    with args.main_process_first(desc="data"):
        train_rows = rows(data_args.train_file)
        eval_rows = rows(data_args.eval_file) if data_args.eval_file else None

    check_rows(args, train_rows, eval_rows)
    found = {"train": train_rows, "eval": eval_rows}
    counted = {name: counts(rows) for name, rows in found.items() if rows is not None}
    names = document_names(data_args, data_args.train_file, task.rows)
    if data_args.show_example:
        if args.process_index == 0:
            row = next(iter(train_rows))
            show_example(row, names(row["documents"]), tokenizer, rows=task.rows)
        return

    references = None
    if task.has_reference:
        references = References(task, model_args, data_args, args, config, names)
    run = define(
        [model_args, data_args, args, args.accelerator_config],
        dtype=compute_dtype(model_args, args.device),
        data=rows_identity(data_args, train_rows),
        model=config.to_dict(),
        num_processes=args.world_size,
        base=weights_identity(model_args.source, config) if model_args.lora_r is not None else None,
        reference=references.identity if references else None,
        teacher=teacher_identity(model_args, args, teacher) if teacher is not None else None,
    )
    check_same_run(
        *(resume, run, args.allow_changed or [], engine.keeps_options),
        tokens_vary=resume is not None and varies(tokenizer),
    )
    if resume:
        print_rank0(resuming(resume))
    if foreseen:
        foreseen.show(train_rows)

    # 4. Other models that the task needs: a reference is loaded alone and gone before training, a
    # teacher stays.
    if references and args.reference:
        found = references.of_another_model(found, engine)
        train_rows, eval_rows = found["train"], found["eval"]
    if teacher is not None:
        task.teacher = load_teacher(model_args, args, teacher)

    # 5. Model: vanilla, liger or custom; random weights depend on the seed alone.
    done = (checkpoint_step(resume) or 0) if resume else 0
    set_seed(args.seed)
    with explained_oom_of_weights(engine, model_args):
        model = load_model(model_args, config, device=args.device, engine=engine)
        with explained_options("these options"):
            trainer = LongTrainer(
                model=model,
                args=args,
                engine=engine,
                seq_len=model_args.seq_len,
                host_memory_gib=model_args.host_memory_gib,
                train_dataset=as_arrays(train_rows),
                eval_dataset=eval_rows,
                task=task,
                data_collator=task.collator(model_args.class_type),
                processing_class=tokenizer,
                document_names=names,
                run=run,
            )
        trainer.place(resume)
        if references and not args.reference:
            references.of_the_start(trainer, resumed=resume is not None)
        options = (model_args, data_args, args)
        record = describe_run(argv, *options, model=trainer.model, counted=counted, step=done)
        record["tracked_as"] = tracked_name(args, resumed=resume is not None)
        trainer.add_callback(RunFile(record, resumed=resume is not None))
        if args.process_index == 0:
            clear_output_dir(output_dir, resume)

    # 6. Train.
    with explained_oom(trainer, model_args), tracked_as(record["tracked_as"], trainer):
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        if not trainer.state.global_step:
            raise UserError("no step was trained: the data gave no batch")
        if trainer.state.global_step == done:
            print_rank0(f"{resume} is where this run ends: nothing was left to train")
        elif foreseen:
            foreseen.compare(trainer, first_step=done)
        evaluated = trainer.evaluate_final() if eval_rows is not None else {}

    # 7. Save what `from_pretrained` loads, and say what happened.
    trainer.save_final(output_dir / FINAL, model_card(record, trainer.state.log_history))
    if trainer.is_world_process_zero():
        goes_on = sample(trainer, train_rows if eval_rows is None else eval_rows)
        summarise(trainer, model_args, data_args, args, output_dir, evaluated, goes_on)
    if lock:
        lock.close()
    engine.shutdown(args)
