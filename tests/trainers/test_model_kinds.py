"""Whichever way a model comes, given, made or under an adapter, its kind is checked before anything is trained."""

import copy

import pytest
import torch
import transformers as tf
from peft import (
    IA3Config,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)

from hf_ebm import EnergyModel
from hf_ebm.trainers import (
    EnergyTrainer,
    EnergyTrainingConfig,
    GRPOConfig,
    GRPOTrainer,
    MGSConfig,
    MGSTrainer,
    MinimumRiskConfig,
    MinimumRiskTrainer,
    PolicyGradientConfig,
    PolicyGradientTrainer,
    RankingConfig,
    RankingTrainer,
    ResidualNCEConfig,
    ResidualNCETrainer,
)
from hf_ebm.trainers.costs import ScorerCost
from tests.causal_families import END, PAD, V, tiny_causal
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers.test_trainers import KINDS, ONE_STEP, collate, rows

pytestmark = pytest.mark.slow

SEARCH_AWARE = {name: KINDS[name] for name in KINDS if name != "soft beam, hinge"}
ON_COSTS = {
    "mgs": (MGSTrainer, MGSConfig, {}),
    "risk": (MinimumRiskTrainer, MinimumRiskConfig, {}),
    "gradient": (PolicyGradientTrainer, PolicyGradientConfig, {}),
    "ranking": (RankingTrainer, RankingConfig, {"candidates": "beams"}),
    "grpo": (GRPOTrainer, GRPOConfig, {"cross_entropy_weight": 1.0}),
}
ENERGIES = {
    "energy": (EnergyTrainer, EnergyTrainingConfig, {}),
    "residual": (ResidualNCETrainer, ResidualNCEConfig, {}),
}
SIZES = dict(vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
IDS = dict(bos_token_id=0, eos_token_id=END, pad_token_id=PAD)


def masked():
    return tf.BertForMaskedLM(tf.BertConfig(**SIZES))


def with_lora(model, *modules):
    return get_peft_model(model, LoraConfig(r=2, target_modules=list(modules)))


def trainer_of(kind, tmp_path, model=None, make=None, **kwargs):
    trainer, config, own = (SEARCH_AWARE | ON_COSTS | ENERGIES)[kind]
    return trainer(model, config(str(tmp_path), **{**ONE_STEP, **own}), model_init=make, **kwargs)


WRONG = {
    **dict.fromkeys(SEARCH_AWARE, (lambda: tiny_causal(dtype=torch.float32), ["c_attn"], "sequence-to-sequence model")),
    **dict.fromkeys(ON_COSTS, (masked, ["query"], "sequence-to-sequence or a causal language model")),
    "energy": (masked, ["query"], "EnergyModel, got BertForMaskedLM"),
    "residual": (masked, ["query"], "ResidualEnergyModel, got BertForMaskedLM"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_model_of_another_kind_is_refused_whichever_way_it_comes(kind, tmp_path):
    make, modules, message = WRONG[kind]
    for given in (
        {"model": make()},
        {"model": with_lora(make(), *modules)},
        {"make": make},
        {"make": lambda: with_lora(make(), *modules)},
        {"model": torch.nn.DataParallel(make())},
    ):
        with pytest.raises(ValueError, match=f"^model must be an? {message}"):
            trainer_of(kind, tmp_path, **given)
    with pytest.raises(ValueError, match=r"model must be a model of Transformers.*, got Linear"):
        trainer_of(kind, tmp_path, torch.nn.Linear(2, 2))


def test_a_model_that_a_search_makes_is_checked(tmp_path):
    made = iter([tiny_seq2seq("bart"), tiny_causal()])
    trainer = trainer_of("cross-entropy", tmp_path, None, lambda trial: next(made), train_dataset=rows())
    trainer.data_collator = collate
    with pytest.raises(ValueError, match=r"model must be a sequence-to-sequence model .*, got GPT2LMHeadModel"):
        trainer.train()


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForQuestionAnswering"])
def test_encoder_decoders_without_a_head_on_tokens_are_refused(head, tmp_path):
    config = tiny_seq2seq("bart").config
    for kind in SEARCH_AWARE | ON_COSTS:
        with pytest.raises(ValueError, match=f"model must be a sequence-to-sequence .*got Bart{head}"):
            trainer_of(kind, tmp_path, getattr(tf, f"Bart{head}")(config))


@pytest.mark.parametrize("kind", ON_COSTS)
def test_models_that_see_what_they_predict_are_refused(kind, tmp_path):
    """BERT that wasn't told to be a decoder, and XLNet, whose targets would be copied from its input."""
    bert = tf.BertLMHeadModel(tf.BertConfig(**SIZES, **IDS))
    xlnet = tf.XLNetLMHeadModel(tf.XLNetConfig(vocab_size=V, d_model=16, n_layer=1, n_head=2, d_inner=16, **IDS))
    for model in (bert, with_lora(bert, "query"), xlnet):
        with pytest.raises(ValueError, match=r"model must be causal; .* sees the tokens after"):
            trainer_of(kind, tmp_path, model)
        with pytest.raises(ValueError, match="model must be causal"):
            ScorerCost(model, PAD)


def test_models_that_do_not_run_are_refused_by_name(tmp_path):
    """XLNet makes its causal mask for one row alone."""

    class Broken(tf.GPT2LMHeadModel):
        def forward(self, input_ids=None, **kwargs):
            raise RuntimeError("no kernel")

    with pytest.raises(ValueError, match="model: Broken doesn't run on a few tokens: no kernel"):
        trainer_of("mgs", tmp_path, Broken(tiny_causal().config))
    sizes = dict(vocab_size=V, d_model=16, n_layer=1, n_head=2, d_inner=16)
    xlnet = tf.XLNetLMHeadModel(tf.XLNetConfig(**sizes, **IDS, attn_type="uni"))
    with pytest.raises(ValueError, match="model: XLNetLMHeadModel can't be decoded"):
        trainer_of("mgs", tmp_path, xlnet)


def test_what_is_asked_of_a_model_is_asked_under_an_adapter(tmp_path):
    rwkv = tf.RwkvForCausalLM(
        tf.RwkvConfig(vocab_size=V, hidden_size=16, num_hidden_layers=8, attention_hidden_size=16, **IDS)
    )
    sparse = tf.BigBirdForCausalLM(tf.BigBirdConfig(**SIZES, is_decoder=True, block_size=4))
    half = tiny_causal(dtype=torch.bfloat16)
    for model, modules, message in (
        (rwkv, ["key"], "model: RwkvForCausalLM rewrites its weights in evaluation"),
        (sparse, ["query"], "model: the block-sparse attention of BigBirdForCausalLM"),
        (half, ["c_attn"], "trained weights must be in float32"),
    ):
        adapted = get_peft_model(model, LoraConfig(target_modules=modules), autocast_adapter_dtype=False)
        for given in ({"model": adapted}, {"make": lambda: adapted}):  # noqa: B023
            with pytest.raises(ValueError, match=message):
                trainer_of("mgs", tmp_path, **given)


def test_adapters_around_an_energy_model_are_refused(tmp_path):
    model = EnergyModel(masked(), mask_token_id=4, special_token_ids=[0, 1, 2])
    with pytest.raises(ValueError, match=r"adapters must be of its masked language model: EnergyModel\(PeftModel\)"):
        trainer_of("energy", tmp_path, with_lora(model, "query"))


PROMPTS = {
    "PROMPT_TUNING": lambda task: PromptTuningConfig(task_type=task, num_virtual_tokens=2),
    "P_TUNING": lambda task: PromptEncoderConfig(task_type=task, num_virtual_tokens=2, encoder_hidden_size=4),
    "PREFIX_TUNING": lambda task: PrefixTuningConfig(task_type=task, num_virtual_tokens=2),
}


@pytest.mark.parametrize("adapter", PROMPTS)
def test_prompts_and_prefixes_are_refused_by_name(adapter, tmp_path):
    for task, make, kinds in (
        ("SEQ_2_SEQ_LM", lambda: tiny_seq2seq("bart"), SEARCH_AWARE | ON_COSTS),
        ("CAUSAL_LM", tiny_causal, ON_COSTS),
    ):
        adapted = get_peft_model(make(), PROMPTS[adapter](task))
        for kind in kinds:
            for given in ({"model": adapted}, {"make": lambda: adapted}):  # noqa: B023
                with pytest.raises(ValueError, match=f"model: an adapter of the type {adapter} puts prompts in front"):
                    trainer_of(kind, tmp_path, **given)


LAYERS = {
    "lora": lambda: LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False),
    "dora": lambda: LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False, use_dora=True),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "fc2"], feedforward_modules=["fc2"], init_ia3_weights=False
    ),
}  # fmt: skip


@pytest.mark.parametrize("adapter", LAYERS)
def test_adapters_in_layers_train_from_the_loss_of_the_merged_model(adapter, tmp_path):
    torch.manual_seed(0)
    adapted = get_peft_model(tiny_seq2seq("bart"), LAYERS[adapter]())
    merged = copy.deepcopy(adapted).merge_and_unload().requires_grad_(True)
    for kind in SEARCH_AWARE | ON_COSTS:
        losses = []
        for model in (copy.deepcopy(merged), copy.deepcopy(adapted)):
            trainer = trainer_of(kind, tmp_path, model, train_dataset=rows(4), data_collator=collate)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            trainer.train()
            losses.append(trainer.state.log_history[0]["loss"])
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        assert moved and all(".lora_" in name or ".ia3_" in name for name in moved)
