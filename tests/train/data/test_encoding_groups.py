"""Prompts and answers as tokens: TRL's own, but where the difference is meant."""

from __future__ import annotations

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from small_tokenizer import PLAIN_CHATML, small_tokenizer
from tokenizers import processors

from longctx.errors import UserError
from longctx.train.data.chat import rendering as chat
from longctx.train.data.reading.groups import AnswerGroup
from longctx.train.data.reading.records import as_document
from longctx.train.data.text.encoding_groups import cut_at_shared, encode_groups

U = {"role": "user", "content": "value?"}
U2 = {"role": "user", "content": "why softmax"}
SYSTEM = {"role": "system", "content": "Be brief."}
A = {"role": "assistant", "content": "query @ key"}
B = {"role": "assistant", "content": "softmax\n\n  é \U0001f600"}
# Like DeepSeek-R1 and Gemma: the prompt alone ends otherwise than before an answer.
OTHER_ALONE = PLAIN_CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>think{% endif %}"
)
# Like Qwen3: reasoning of earlier answers goes, that of the last one stays.
REASONS = PLAIN_CHATML.replace(
    "{{ m['content'] }}",
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m['content'] }}",
)


def groups_of(records, rows="pairs", tokenizer=None, vocab_size=None) -> list[AnswerGroup]:
    documents = [as_document(r, f"f:{i}", rows=rows) for i, r in enumerate(records, 1)]
    return encode_groups(documents, tokenizer or small_tokenizer(), vocab_size)


def texts_of(group, tokenizer=None) -> list[str]:
    tokenizer = tokenizer or small_tokenizer()
    return [tokenizer.decode(ids.tolist()) for ids in (group.prompt, *group.answers)]


def trl_rows(trainer, records, tokenizer) -> list[dict]:
    """What a trainer of TRL makes of records, without a trainer."""
    trl = pytest.importorskip("trl")
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    stub = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    stub.desirable_weight = stub.undesirable_weight = 1.0
    dataset = datasets.Dataset.from_list(records)
    return list(getattr(trl, trainer)._prepare_dataset(stub, dataset, tokenizer, args, "train"))


CONVERSATIONS = {
    "explicit": {"prompt": [U], "chosen": [A], "rejected": [B]},
    "system and history": {"prompt": [SYSTEM, U, A, U2], "chosen": [B], "rejected": [A]},
    "implicit": {"chosen": [SYSTEM, U, A], "rejected": [SYSTEM, U, B]},
    "implicit history": {"chosen": [U, A, U2, B], "rejected": [U, A, U2, A]},
    "several turns": {"prompt": [U], "chosen": [A, U2, B], "rejected": [B]},
    "a beginning": {"chosen": [U, A, U2, B], "rejected": [U, A]},
}
WHOLE_STRINGS = {
    "a space": {"chosen": "value? query @ key", "rejected": "value? softmax"},
    "within a word": {"chosen": "the value of softmax", "rejected": "the value of softly"},
    "a beginning": {"chosen": "softmax value", "rejected": "softmax value query"},
    "unusual": {"chosen": "é \U0001f600 \U0001f600 a", "rejected": "é \U0001f600 b"},
}
TEMPLATES = {"marked": "default", "plain": PLAIN_CHATML, "other alone": OTHER_ALONE}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("record", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversations_are_those_of_trl(record, template):
    tokenizer = small_tokenizer(template)
    (expected,) = trl_rows("DPOTrainer", [record], tokenizer)
    (group,) = groups_of([record], tokenizer=tokenizer)
    assert group.prompt.tolist() == expected["prompt_ids"]
    assert group.answers[0].tolist() == expected["chosen_ids"]
    assert group.answers[1].tolist() == expected["rejected_ids"]
    assert group.sides == (0, 1) and (group.dropped > 0) == (template == OTHER_ALONE)
    rated = trl_rows("KTOTrainer", [record], tokenizer)
    (unpaired,) = groups_of([record], "rated", tokenizer)
    assert [row["prompt_ids"] for row in rated] == [unpaired.prompt.tolist()] * 2
    assert [row["completion_ids"] for row in rated] == [a.tolist() for a in unpaired.answers]
    assert [row["label"] for row in rated] == [side == 0 for side in unpaired.sides]


@pytest.mark.parametrize("record", WHOLE_STRINGS.values(), ids=WHOLE_STRINGS)
def test_whole_strings_are_those_of_trl(record):
    (expected,) = trl_rows("DPOTrainer", [record], small_tokenizer())
    (group,) = groups_of([record])
    assert group.prompt.tolist() == expected["prompt_ids"]
    assert group.answers[0].tolist() == expected["chosen_ids"]
    assert group.answers[1].tolist() == expected["rejected_ids"]


def test_prompts_that_are_strings_keep_their_last_token():
    """TRL tokenises prompt and answer as a whole, and gives the answer what merges across."""
    record = {"prompt": "softmax val", "chosen": "ue of it", "rejected": "id"}
    tokenizer = small_tokenizer()
    (expected,) = trl_rows("DPOTrainer", [record], tokenizer)
    (group,) = groups_of([record])
    assert texts_of(group) == ["<|bos|>softmax val", "ue of it<|im_end|>", "id<|im_end|>"]
    assert tokenizer.decode(expected["prompt_ids"]) == "<|bos|>softmax"
    assert tokenizer.decode(expected["chosen_ids"]) == " value of it<|im_end|>"
    assert tokenizer.decode(expected["rejected_ids"]) == " valid<|im_end|>"


def test_prompts_that_end_at_a_token_are_those_of_trl():
    records = [
        {"prompt": "value?\n", "chosen": "query", "rejected": "key é"},
        {"prompt": "value?", "chosen": " query @ key", "rejected": " softmax<|im_end|>"},
    ]
    for record, row in zip(
        records, trl_rows("DPOTrainer", records, small_tokenizer()), strict=True
    ):
        (group,) = groups_of([record])
        found = [ids.tolist() for ids in (group.prompt, *group.answers)]
        assert found == [row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]]


@pytest.mark.parametrize("label", [True, False])
def test_rated_answers_are_those_of_trl(label):
    for record in (
        {"prompt": [U], "completion": [A], "label": label},
        {"prompt": "value?\n", "completion": "query", "label": label},
    ):
        (row,) = trl_rows("KTOTrainer", [record], small_tokenizer())
        (group,) = groups_of([record], "rated")
        assert [group.prompt.tolist()] == [row["prompt_ids"]]
        assert [a.tolist() for a in group.answers] == [row["completion_ids"]]
        assert group.sides == (0 if label else 1,)


def test_mismatched_answers_of_a_batch_are_the_set_of_trl():
    """In TRL each example of a batch has the answer before it, here each the one after it: over a
    whole batch the same answers."""
    pytest.importorskip("trl")
    from longctx.train.data.pack.packing_groups import with_mismatched

    records = [
        {"prompt": [U], "completion": [{**A, "content": f"answer {n}"}], "label": n % 2 == 0}
        for n in range(5)
    ]
    groups = list(with_mismatched(groups_of(records, "rated")))
    own, borrowed = ([g.answers[k].tolist() for g in groups] for k in (0, 1))
    assert borrowed == [*own[1:], own[0]]  # TRL: [own[-1], *own[:-1]]
    assert all(g.sides[1] == 2 for g in groups)


def test_rendered_prompts_are_whole_and_shared():
    (group,) = groups_of([{"prompt": [U], "chosen": [A], "rejected": [B], "margin": 0.25}])
    prompt = "<|bos|><|im_start|>user\nvalue?<|im_end|>\n<|im_start|>assistant\n"
    ends = [turn["content"] + "<|im_end|>\n" for turn in (A, B)]
    assert texts_of(group) == [prompt, *ends]
    assert group.margin == 0.25 and group.dropped == 0


def test_reasoning_of_an_answer_counts_and_that_of_the_prompt_may_go():
    thought = {**A, "reasoning_content": "hm"}
    record = {"prompt": [U, thought, U2], "chosen": [thought], "rejected": [B]}
    prompt, chosen, rejected = texts_of(groups_of([record], tokenizer=small_tokenizer(REASONS))[0])
    assert "hm" not in prompt and "hm" not in rejected
    assert chosen.startswith("<think>hm</think>query")


@pytest.mark.parametrize("key", ["tools", "documents", "tool_calls"])
def test_what_a_template_leaves_out_is_refused(key):
    record = {"prompt": [U], "chosen": [A], "rejected": [B]}
    if key == "tool_calls":
        record["rejected"] = [{**B, "tool_calls": [{"function": {"name": "f"}}]}]
    else:
        record[key] = [{"x": 1}]
    with pytest.raises(UserError, match=f"^f:1: the chat template leaves out `{key}`"):
        groups_of([record])


def test_an_empty_prompt_has_a_token():
    record = {"prompt": "", "chosen": "a", "rejected": "b"}
    assert texts_of(groups_of([record])[0])[0] == "<|bos|>"
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])  # adds no bos
    assert texts_of(groups_of([record], tokenizer=tokenizer)[0])[0] == "<|bos|>"
    tokenizer.bos_token = None
    assert texts_of(groups_of([record], tokenizer=tokenizer)[0])[0] == "<|im_end|>"
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="^f:1: the prompt is empty, and the tokenizer has neither"):
        groups_of([record], tokenizer=tokenizer)


def test_answers_end_with_one_eos():
    record = {"prompt": "p", "chosen": "a<|im_end|>", "rejected": "b"}
    assert texts_of(groups_of([record])[0])[1:] == ["a<|im_end|>", "b<|im_end|>"]


def test_a_tokenizer_that_ends_every_text_does_not_end_the_prompt():
    tokenizer = small_tokenizer()
    ids = [(t, tokenizer.convert_tokens_to_ids(t)) for t in ("<|bos|>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|im_end|>", special_tokens=ids
    )
    for record in (
        {"prompt": "p ", "chosen": "a", "rejected": "b"},
        {"chosen": "p a", "rejected": "p b"},
    ):
        prompt, *answers = texts_of(groups_of([record], tokenizer=tokenizer)[0])
        assert prompt.startswith("<|bos|>p") and "<|im_end|>" not in prompt
        assert [a.strip() for a in answers] == ["a<|im_end|>", "b<|im_end|>"]


TEMPLATES_THAT_FAIL = {
    "none": (None, "the tokenizer has no chat template"),
    "refuses": ("{{ raise_exception('no') }}", "the chat template refuses this conversation: no"),
    "nothing in common": (
        "{% if add_generation_prompt %}x{% else %}{{ messages[-1].content }}{% endif %}",
        "renders no beginning of the prompt alike",
    ),
    "nothing of an answer": ("{{ messages[0].content }}", "shows nothing of an answer"),
    "nothing": ("", "has no chat template"),
    "too much": ("{{ 'ab' * 10 ** 6 }}", "makes 2,000,000 characters"),
}


@pytest.mark.parametrize(
    ("template", "message"), TEMPLATES_THAT_FAIL.values(), ids=TEMPLATES_THAT_FAIL
)
def test_a_template_that_cannot_be_used_is_one_line(template, message):
    record = {"prompt": [U], "chosen": [A], "rejected": [B]}
    with pytest.raises(UserError, match=f"^f:1: .*{message}"):
        groups_of([record], tokenizer=small_tokenizer(template))


def test_tokens_beyond_the_vocabulary():
    with pytest.raises(UserError, match="but the model's vocabulary has 5 tokens"):
        groups_of([{"prompt": "p", "chosen": "a", "rejected": "b"}], vocab_size=5)


def test_mixed_records_keep_their_order():
    records = [
        {"prompt": "p1", "chosen": "a", "rejected": "b"},
        {"prompt": [U], "chosen": [A], "rejected": [B]},
        {"prompt": "p2", "chosen": "a", "rejected": "b"},
        {"prompt": [U2], "chosen": [A], "rejected": [B]},
    ]
    prompts = [texts_of(group)[0] for group in groups_of(records)]
    assert all(
        word in text for word, text in zip(["p1", "value", "p2", "why"], prompts, strict=True)
    )


def test_one_process_renders_batch_after_batch():
    record = {"prompt": [U], "chosen": [A], "rejected": [B]}
    groups_of([record] * 3)
    process = chat._child().pid
    groups_of([record] * 40)
    assert chat._child().pid == process


def test_the_shared_beginning():
    def cut(prompt, *whole):
        found = cut_at_shared(np.array(prompt, int), [np.array(ids, int) for ids in whole])
        return found[0].tolist(), [ids.tolist() for ids in found[1]], found[2]

    assert cut([1, 2], [1, 2, 3], [1, 2, 4, 5]) == ([1, 2], [[3], [4, 5]], 0)
    assert cut([1, 2, 9], [1, 2, 3], [1, 4]) == ([1], [[2, 3], [4]], 2)
    assert cut([1, 2], [1], [1, 2]) == ([1], [[], [2]], 1)
    assert cut([], [1], [2]) == ([], [[1], [2]], 0)
