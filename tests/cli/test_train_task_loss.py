"""`hf-ebm train mgs|minimum-risk|policy-gradient`: causal models, costs, scorers, decoders, resuming, refusals."""

import json
import math

import pytest
import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
)

from hf_ebm.cli.train import OBJECTIVES
from hf_ebm.cli.training.data import BUILT_IN
from hf_ebm.cli.training.models import TAGGING, TRANSCRIPTION
from hf_ebm.data.metrics import transcription_scores
from hf_ebm.data.symbols import symbol_tokenizer
from hf_ebm.objectives.sequence_costs import normalized_edit_distance
from tests.cli.conftest import read, run
from tests.cli.test_train import LSTM, result, reversals, save_bart, write
from tests.conftest import tiny_mlm
from tests.models.tokenizers_for_tests import small_tokenizer

pytestmark = pytest.mark.slow

KINDS = ("mgs", "minimum-risk", "policy-gradient")
QUICK = ["--use_cpu", "--learning_rate", "0.01", "--max_steps", "3", "--logging_steps", "1"]
EVALUATE = ["--do_eval", "--predict_with_generate"]
END, PAD = "<|endoftext|>", "<pad>"


def continuations(count: int, seed: int) -> list[dict]:
    """As a byte-level tokenizer wants them: the target begins with its space."""
    return [{**row, "target": f" {row['target']}"} for row in reversals(count, seed)]


def byte_level_tokenizer(pad: bool = True, side: str = "right") -> PreTrainedTokenizerFast:
    """Of GPT-2's kind: one token for start and end, none around a text. `<pad>` has an id, declared or not."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = [row["source"] + row["target"] for row in continuations(50, 3)]
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=40, special_tokens=[END, PAD], show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END, eos_token=END, unk_token=END, padding_side=side,
        **({"pad_token": PAD} if pad else {}),
    )  # fmt: skip


def save_gpt2(path, tokenizer=None, seed: int = 0, **changes) -> str:
    tokenizer = byte_level_tokenizer() if tokenizer is None else tokenizer
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=len(tokenizer), n_positions=40, n_embd=16, n_layer=1, n_head=2, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(**{**settings, **changes}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write(folder / "train.jsonl", continuations(18, 0))
    write(folder / "validation.jsonl", continuations(7, 1))
    return str(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> str:
    return save_gpt2(tmp_path_factory.mktemp("gpt2"))


def nats(model, prompt: list[int], target: list[int]) -> float:
    """-log p(target | prompt) of one row."""
    logits = model(torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(target), reduction="sum"))


def greedy(model, prompt: list[int], most: int, end: int) -> list[int]:
    found = []
    while len(found) < most and end not in found:
        found.append(int(model(torch.tensor([prompt + found])).logits[0, -1].argmax()))
    return found


def rows_of(folder, tokenizer) -> list[tuple[list[int], list[int]]]:
    rows = read(f"{folder}/validation.jsonl")
    return [(tokenizer(row["source"])["input_ids"], [*tokenizer(row["target"])["input_ids"], 0]) for row in rows]


@torch.no_grad()
@pytest.mark.parametrize("objective", KINDS)
def test_evaluation_is_that_of_a_plain_loop_on_the_saved_model(objective, folder, gpt2, tmp_path, capsys, monkeypatch):
    kept = []

    def save_state(self):
        kept.append(self.model)
        Trainer.save_state(self)

    monkeypatch.setattr(OBJECTIVES[objective][1], "save_state", save_state)
    with torch.enable_grad():
        run(
            "train",
            objective,
            "--task",
            folder,
            "--model_name_or_path",
            gpt2,
            *QUICK,
            *EVALUATE,
            "--output_dir",
            tmp_path,
        )
    found = result(capsys)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    rows = rows_of(folder, tokenizer)
    ids = torch.tensor([rows[0][0]])
    assert torch.equal(model(ids).logits, kept[0].eval()(ids).logits)
    before = AutoModelForCausalLM.from_pretrained(gpt2)
    assert not torch.equal(before(ids).logits, model(ids).logits)
    num_tokens = sum(len(target) for _, target in rows)
    assert found["eval_loss"] == pytest.approx(sum(nats(model, *row) for row in rows) / num_tokens, rel=1e-5)
    most = math.ceil(1.3 * max(len(target) for _, target in rows))
    predictions = [greedy(model, prompt, most, 0) for prompt, _ in rows]
    costs = normalized_edit_distance(predictions, [target for _, target in rows])
    assert found["eval_cost"] == pytest.approx(float(costs.mean()), rel=1e-6)
    texts = tokenizer.batch_decode(predictions, skip_special_tokens=True)
    expected = transcription_scores(texts, [row["target"] for row in read(f"{folder}/validation.jsonl")])
    assert {name: found[f"eval_{name}"] for name in TRANSCRIPTION} == pytest.approx(expected)


@pytest.mark.parametrize("objective", KINDS)
def test_rewards_by_name_are_negative_costs(objective, folder, gpt2, tmp_path, capsys):
    """Weighted, they make up the cost; the best model is that of the highest reward."""
    found = []
    for name, options in (
        ("cost", ["--cost", "edit_distance", "--metric_for_best_model", "cost"]),
        (
            "rewards",
            ["--reward_funcs", "neg_edit_distance", "neg_repetition", "--reward_weights", "1", "0",
             "--metric_for_best_model", "reward"],
        ),
    ):  # fmt: skip
        best = ["--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", "1", "--save_steps", "1"]
        output = tmp_path / name
        run(
            "train",
            objective,
            "--task",
            folder,
            "--model_name_or_path",
            gpt2,
            *QUICK,
            *best,
            *options,
            "--output_dir",
            output,
        )
        found.append((result(capsys), load_file(output / "model.safetensors")))
    (of_cost, weights), (of_rewards, others) = found
    assert of_rewards["eval_reward"] == pytest.approx(-of_cost["eval_cost"])
    assert of_rewards["eval_rewards/neg_edit_distance/mean"] == of_rewards["eval_reward"]
    assert "eval_rewards/neg_repetition/std" in of_rewards and "eval_reward" not in of_cost
    assert all(torch.equal(weights[name], value) for name, value in others.items())


@pytest.mark.parametrize("objective", KINDS)
def test_padding_changes_nothing(objective, folder, tmp_path, capsys):
    """Padding on either side, with a token of its own or with the end token, which stays undeclared.

    A token of its own is never sampled, so that samples are compared among equal tokenizers alone.
    """
    found, weights = [], []
    for pad in (True, False):
        for side in ("left", "right"):
            start = save_gpt2(tmp_path / f"{pad}-{side}", byte_level_tokenizer(pad, side))
            output = tmp_path / f"{pad}-{side}-trained"
            run(
                "train", objective, "--task", folder, "--model_name_or_path", start, *QUICK, *EVALUATE, "--output_dir",
                output, "--max_steps", "2",
            )  # fmt: skip
            values = result(capsys)
            found.append({name: value for name, value in values.items() if not name.endswith(("runtime", "second"))})
            weights.append(load_file(output / "model.safetensors"))
            tokenizer = AutoTokenizer.from_pretrained(output)
            assert (tokenizer.pad_token, tokenizer.padding_side) == (PAD if pad else None, side)
            assert AutoModelForCausalLM.from_pretrained(output).get_input_embeddings().num_embeddings == len(tokenizer)
    assert "eval_cost" in found[0]
    for one, other in ((0, 1), (2, 3), *([(0, 2)] if objective == "mgs" else [])):
        assert found[other] == pytest.approx(found[one])
        assert all(torch.equal(weights[other][name], value) for name, value in weights[one].items())


@pytest.mark.parametrize(
    ("objective", "cost"), zip(KINDS, ("meteor_without_synonyms", "repetition", "sentence_bleu"), strict=True)
)
def test_fresh_models_are_trained_on_costs(objective, cost, folder, tmp_path, capsys):
    run("train", objective, "--task", folder, *LSTM, *QUICK, *EVALUATE, "--cost", cost, "--output_dir", tmp_path)
    found = result(capsys)
    assert {"eval_loss", "eval_cost", *(f"eval_{name}" for name in TRANSCRIPTION)} <= set(found)
    logs = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert all("cost" in log or "candidate_cost" in log for log in logs if "loss" in log)
    # The saved model generates as far as evaluation does.
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generation_config
    longest = max(len(row["target"].split()) + 1 for row in continuations(18, 0) + continuations(7, 1))
    assert config.max_length == 1 + math.ceil(1.3 * longest)


def test_taggers_are_trained(tmp_path, capsys, monkeypatch):
    """Fixed attention."""
    rows = {"source": ["HH AH L OW", "AH B AW T"] * 9, "target": ["- 0 - 1", "0 - 1 -"] * 9}
    splits = DatasetDict(train=Dataset.from_dict(rows), validation=Dataset.from_dict(rows))
    monkeypatch.setitem(BUILT_IN, "cmudict-stress", lambda: splits)
    for objective in KINDS:
        output = tmp_path / objective
        run("train", objective, "--task", "cmudict-stress", *LSTM, *QUICK, *EVALUATE, "--output_dir", output)
        assert {"eval_cost", *(f"eval_{name}" for name in TAGGING)} <= set(result(capsys))
        assert AutoModelForSeq2SeqLM.from_pretrained(output).config.attention == "fixed"


@pytest.mark.parametrize("pad", [PAD, None])
def test_causal_spellers_are_scored_on_all_references(pad, tmp_path, capsys, monkeypatch):
    """A tokenizer that ends every text; without `<pad>` the end token is padding, which rows hold as well."""
    rows = [{"source": row["source"], "target": row["target"][1:]} for row in continuations(20, 4)]
    rows = [{**row, "references": [row["target"], f"{row['target']} A"]} for row in rows]
    splits = DatasetDict(train=Dataset.from_list(rows), validation=Dataset.from_list(rows))
    monkeypatch.setitem(BUILT_IN, "cmudict-g2p", lambda: splits)
    tokenizer = symbol_tokenizer([row["target"] for row in rows], [row["source"] for row in rows])
    tokenizer.pad_token = pad
    start = save_gpt2(tmp_path / "gpt2", tokenizer)
    run(
        "train", "policy-gradient", "--task", "cmudict-g2p", "--model_name_or_path", start, *QUICK, *EVALUATE, "--cost",
        "phoneme_error", "--output_dir", tmp_path / "out", "--train_sampling_strategy", "group_by_length",
    )  # fmt: skip
    found = result(capsys)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = []
    for number, row in enumerate(rows):
        batch = rows[number // 8 * 8 : number // 8 * 8 + 8]
        most = math.ceil(1.3 * max(len(other["target"].split()) + 1 for other in batch))
        prompt = tokenizer(row["source"])["input_ids"]
        assert prompt[-1] == 2
        with torch.no_grad():
            ids.append(greedy(model, prompt[:-1], most, 2))
    predictions = tokenizer.batch_decode(ids, skip_special_tokens=True)
    expected = transcription_scores(predictions, [row["references"] for row in rows])
    assert {name: found[f"eval_{name}"] for name in TRANSCRIPTION} == pytest.approx(expected)
    costs = normalized_edit_distance(predictions, [row["target"] for row in rows])
    assert found["eval_cost"] == pytest.approx(float(costs.mean()))


@torch.no_grad()
def test_a_scorer_gives_the_cost(folder, gpt2, tmp_path, capsys):
    scorer = save_gpt2(tmp_path / "scorer", seed=5, n_positions=64)
    with torch.enable_grad():
        run(
            "train", "mgs", "--task", folder, "--model_name_or_path", gpt2, "--scorer_model", scorer, *QUICK,
            *EVALUATE, "--output_dir", tmp_path / "out",
        )  # fmt: skip
    found = result(capsys)
    model, judge = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), AutoModelForCausalLM.from_pretrained(scorer)
    rows = rows_of(folder, AutoTokenizer.from_pretrained(gpt2))
    most = math.ceil(1.3 * max(len(target) for _, target in rows))
    costs = [nats(judge, prompt, greedy(model, prompt, most, 0)) for prompt, _ in rows]
    assert found["eval_cost"] == pytest.approx(sum(costs) / len(costs), rel=1e-5)


def test_a_sequence_to_sequence_scorer_gives_the_cost(folder, tmp_path, capsys):
    for name, more in (("scorer", []), ("out", ["--scorer_model", tmp_path / "scorer", *EVALUATE])):
        run("train", "minimum-risk", "--task", folder, *LSTM, *QUICK, *more, "--output_dir", tmp_path / name)
        lines = capsys.readouterr().out
    found = json.loads(lines)
    model, judge = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name) for name in ("out", "scorer"))
    tokenizer, costs = AutoTokenizer.from_pretrained(tmp_path / "out"), []
    rows = read(f"{folder}/validation.jsonl")
    longest = max(len(row["target"].split()) + 1 for row in rows)
    for row in rows:
        inputs = tokenizer(row["source"], return_tensors="pt")
        ids = model.generate(**inputs, max_length=1 + math.ceil(1.3 * longest))[:, 1:]
        with torch.no_grad():
            costs.append(float(judge(**inputs, labels=ids).loss) * ids.shape[1])
    assert found["eval_cost"] == pytest.approx(sum(costs) / len(costs), rel=1e-5)


def test_a_generation_config_says_how_is_decoded(folder, gpt2, tmp_path, capsys):
    GenerationConfig(num_beams=3, length_penalty=2.0).save_pretrained(tmp_path / "beams")
    run(
        "train", "mgs", "--task", folder, "--model_name_or_path", gpt2, *QUICK, *EVALUATE, "--output_dir",
        tmp_path / "out", "--generation_config", tmp_path / "beams",
    )  # fmt: skip
    found = result(capsys)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(gpt2)
    assert model.generation_config.num_beams is None
    rows = rows_of(folder, tokenizer)
    most = math.ceil(1.3 * max(len(target) for _, target in rows))
    how = dict(num_beams=3, length_penalty=2.0, max_new_tokens=most, pad_token_id=0)
    texts = [
        tokenizer.decode(model.generate(torch.tensor([prompt]), **how)[0, len(prompt) :], skip_special_tokens=True)
        for prompt, _ in rows
    ]
    expected = transcription_scores(texts, [row["target"] for row in read(f"{folder}/validation.jsonl")])
    assert {name: found[f"eval_{name}"] for name in TRANSCRIPTION} == pytest.approx(expected)


@pytest.mark.parametrize("length", [{"max_new_tokens": 2}, {"max_length": 3}])
def test_a_generation_config_says_how_long_is_decoded(length, folder, tmp_path, capsys):
    """In training and evaluation, and by the saved model of the objectives on what is decoded."""
    GenerationConfig(**length).save_pretrained(tmp_path / "short")
    for objective in ("minimum-risk", "cross-entropy"):
        run(
            "train", objective, "--task", folder, *LSTM, *QUICK, *EVALUATE, "--output_dir", tmp_path / objective,
            "--generation_config", tmp_path / "short",
        )  # fmt: skip
        assert 0 < result(capsys)["eval_decoded_length"] <= 2
        logs = json.loads((tmp_path / objective / "trainer_state.json").read_text())["log_history"]
        assert all(log["decoded_length"] <= 2 for log in logs if "candidate_cost" in log)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "minimum-risk").generation_config.max_length == 3


@pytest.mark.half_precision
@pytest.mark.parametrize("objective", KINDS)
def test_checkpointed_activations_and_bfloat16(objective, folder, gpt2, tmp_path, capsys):
    common = ["--task", folder, "--model_name_or_path", gpt2, *QUICK, *EVALUATE]
    outputs = {}
    for name, options in (("plain", []), ("saving", ["--activation_checkpointing"]), ("half", ["--bf16"])):
        run("train", objective, *common, *options, "--output_dir", tmp_path / name)
        outputs[name] = result(capsys)["eval_loss"], load_file(tmp_path / name / "model.safetensors")
    plain, saving, half = outputs.values()
    assert all(torch.allclose(saving[1][name], value, atol=1e-4) for name, value in plain[1].items())
    assert half[0] == pytest.approx(plain[0], rel=0.02) and half[0] != plain[0]
    assert all(value.dtype == torch.float32 for value in half[1].values())


def test_an_end_token_of_the_tokenizer_will_do(folder, tmp_path, capsys):
    start = save_gpt2(tmp_path / "gpt2", eos_token_id=None)
    output = tmp_path / "out"
    run("train", "mgs", "--task", folder, "--model_name_or_path", start, *QUICK, "--do_eval", "--output_dir", output)
    assert result(capsys)["eval_cost"] > 0
    assert AutoModelForCausalLM.from_pretrained(output).generation_config.eos_token_id == [0]


def test_the_best_model_has_the_lowest_cost(folder, gpt2, tmp_path):
    run(
        "train", "policy-gradient", "--task", folder, "--model_name_or_path", gpt2, *QUICK, "--output_dir", tmp_path,
        "--max_steps", "8", "--learning_rate", "0.05", "--eval_strategy", "steps", "--eval_steps", "1",
        "--save_strategy", "steps", "--save_steps", "1", "--load_best_model_at_end", "--metric_for_best_model", "cost",
    )  # fmt: skip
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    costs = [log["eval_cost"] for log in state["log_history"] if "eval_cost" in log]
    assert len(set(costs)) > 1 and state["best_metric"] == min(costs)


def test_a_resumed_run_is_the_same_run(folder, gpt2, tmp_path):
    """With dropout, samples and a running mean; the process goes on, but with other random numbers."""
    common = ["policy-gradient", "--baseline", "running_mean", "--task", folder, "--model_name_or_path", gpt2]
    common += ["--use_cpu", "--learning_rate", "0.01", "--max_steps", "6", "--logging_steps", "1", "--save_steps", "3"]
    run("train", *common, "--output_dir", tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole" / "checkpoint-3").rename(tmp_path / "cut" / "checkpoint-3")
    torch.manual_seed(99)
    run("train", *common, "--output_dir", tmp_path / "cut", "--resume_from_checkpoint", "last")
    logs = [
        json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"] for name in ("whole", "cut")
    ]
    names = ("step", "loss", "baseline", "candidate_cost")
    whole, cut = [[[log[name] for name in names] for log in history if "loss" in log] for history in logs]
    assert len(whole) == 6 and whole == cut
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def test_help(capsys):
    run("train", "--help")
    shown = capsys.readouterr().out
    assert all(name in shown for name in KINDS)
    with pytest.raises(SystemExit):
        run("train", "mgs", "--help")
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("--scorer_model", "--cost", "--mixture", "meteor_without_synonyms"))


REFUSED = {
    "mgs --cost wer": "cost must be a callable or one of edit_distance",
    "mgs --num_candidates 0": "num_candidates must be a whole number from 1 up, got 0",
    "mgs --mixture 1.5": "mixture must be a number from 0 to 1, got 1.5",
    "mgs --max_length_ratio 0": "max_length_ratio must be a number above 0",
    "minimum-risk --sharpness 0": "sharpness must be a number above 0",
    "policy-gradient --baseline none": "baseline must be one of 'self_critical', 'running_mean', ",
    "mgs --scorer_model {d}/gpt2 --cost repetition": "scorer_model and cost must not both be given",
    "mgs --scorer_model {d}/gpt2 --reward_funcs neg_repetition": "scorer_model and reward_funcs must not both be given",
    "mgs --cost repetition --reward_funcs neg_repetition": "cost and reward_funcs must not both be given",
    "mgs --reward_funcs repetition": "must be 'neg_repetition'",
    "mgs --reward_funcs neg_repetition --reward_weights 1 2": "reward_weights must be 1",
    "mgs --metric_for_best_model reward": "must be one of loss, cost, decoded_length",
    "mgs --task {d}/blank.jsonl --reward_funcs neg_phoneme_error": "target of row 1 of split 'train' must hold",
    "mgs --scorer_model {d}/symbols": "scorer_model must have the vocabulary of the model that is trained, which has",
    "mgs --scorer_model {d}/bart": "scorer_model must be causal like the model that is trained",
    "mgs --scorer_model {d}/mlm": "scorer_model: '{d}/mlm' of the type 'bert' must be causal",
    "mgs --scorer_model {d}/small": "scorer_model must know the 23 ids that the model predicts",
    "mgs --scorer_model {d}/short": "scorer_model must have 16 positions, for prompts of up to 6 tokens and up to 10",
    "mgs --scorer_model {d}/nowhere": "scorer_model: '{d}/nowhere' cannot be loaded",
    "mgs --model_name_or_path {d}/mlm": "model_name_or_path: '{d}/mlm' of the type 'bert' must be causal",
    "mgs --model_name_or_path {d}/small": "the tokenizer uses the id",
    "mgs --model_name_or_path {d}/endless": "neither the model nor its tokenizer has an eos_token",
    "mgs --model_name_or_path {d}/vit": "(AutoModelForSeq2SeqLM) or a causal model (AutoModelForCausalLM), got",
    "mgs --model_name_or_path {d}/short": "row 0 of split 'train' has 6 source and 7 target tokens, together more than",
    "soft-beam": "must be a sequence-to-sequence model (AutoModelForSeq2SeqLM), got '{d}/gpt2' of the type 'gpt2'",
    "soft-beam --model_name_or_path {d}/bart --scorer_model {d}/bart": "--scorer_model",
    "mgs --task {d}/promptless.jsonl": "source of row 1 of split 'train' has no token",
    "mgs --task {d}/ended.jsonl": "target of row 0 of split 'train' holds '<|endoftext|>'",
    "mgs --task {d}/blank.jsonl --cost sentence_bleu": "target of row 1 of split 'train' must hold a symbol",
    "mgs --max_source_length 5": "source of row 0 of split 'train' has 6 tokens, more than the 5 allowed",
    "mgs --max_target_length 6": "target of row 0 of split 'train' has 7 tokens, more than the 6 allowed",
    "mgs --generation_config {d}/nowhere": "generation_config: '{d}/nowhere' cannot be loaded",
    "mgs --do_eval --eval_file {d}/good.jsonl --predict_with_generate --generation_max_length 6": "must be above 6",
    "mgs --generation_config {d}/short_config": "max_length counts the prompt of a causal model and must be above 6",
    "mgs --metric_for_best_model candidate_cost": "must be one of loss, cost, decoded_length",
    "mgs --task {d}/prompts.jsonl": "prompts.jsonl has no column 'target', which the objective",
    "mgs --task {d}/prompts.jsonl --reward_funcs neg_edit_distance": "no column 'target', which the objective",
    "policy-gradient --task {d}/prompts.jsonl --reward_funcs neg_repetition --cross_entropy_weight 1": "no column",
    "grpo --task {d}/prompts.jsonl --reward_funcs neg_repetition --max_source_length 5": "source of row 0 of split 't",
    "mgs --task {d}/prompts.jsonl --do_eval --eval_file {d}/good.jsonl": "must have a column 'target' or none of them",
    "mgs --task {d}/prompts.jsonl --do_eval --eval_file {d}/prompts.jsonl --predict_with_generate "
    "--reward_funcs neg_repetition": "predict_with_generate scores outputs by targets",
    "cross-entropy --model_name_or_path {d}/bart --task {d}/prompts.jsonl": "row 0 has no 'target'; its columns are",
    "mgs --model_name_or_path lstm --task {d}/prompts.jsonl": "row 0 has no 'target'",
    "mgs --task {d}/half.jsonl --reward_funcs neg_repetition": "row 1 has no 'target'",
    "cross-entropy --model_name_or_path {d}/bart --metric_for_best_model cost": "must be one of loss, phoneme_error",
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    good = {"source": "a b c d e a", "target": " A E D C B A"}
    write(folder / "good.jsonl", [good] * 3)
    GenerationConfig(max_length=6).save_pretrained(folder / "short_config")
    write(folder / "prompts.jsonl", [{"source": good["source"]}] * 3)
    write(folder / "half.jsonl", [good, {"source": good["source"]}])
    write(folder / "promptless.jsonl", [good, {**good, "source": ""}])
    write(folder / "ended.jsonl", [{**good, "target": f" A{END} B"}])
    write(folder / "blank.jsonl", [good, {**good, "target": " "}])
    save_gpt2(folder / "gpt2")
    save_gpt2(folder / "small", vocab_size=20)
    save_gpt2(folder / "short", n_positions=12)
    save_gpt2(folder / "symbols", symbol_tokenizer(["A B"], ["a b"]))
    endless = byte_level_tokenizer()
    endless.eos_token = None
    save_gpt2(folder / "endless", endless)
    save_bart(folder / "bart")
    tiny_mlm(200).save_pretrained(folder / "mlm")
    small_tokenizer("wordpiece").save_pretrained(folder / "mlm")
    (folder / "vit").mkdir()
    (folder / "vit" / "config.json").write_text('{"model_type": "vit"}')
    return folder


@pytest.mark.parametrize("options", REFUSED)
def test_refusals_are_one_line(options, broken, tmp_path, capsys):
    objective, *given = options.format(d=broken).split()
    with pytest.raises(SystemExit) as exit_code:
        run(
            "train", objective, "--task", broken / "good.jsonl", "--model_name_or_path", broken / "gpt2", "--use_cpu",
            "--output_dir", tmp_path / "out", *given,
        )  # fmt: skip
    captured = capsys.readouterr()
    message = captured.err[captured.err.index("hf-ebm: ") :]
    assert exit_code.value.code == 2 and REFUSED[options].format(d=broken) in message and not captured.out
    assert message.count("\n") == 1
    assert not any((tmp_path / "out").glob("*"))
