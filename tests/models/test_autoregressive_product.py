"""The product of two language models against its definition."""

import pytest
import torch
import transformers as tf

from hf_ebm.models.autoregressive_product import ProductLM
from tests.causal_families import tiny_causal
from tests.models.residual_models import PREFIX, exact_log_probs, toy_lm

pytestmark = pytest.mark.slow


def product() -> ProductLM:
    return ProductLM(toy_lm(), toy_lm(seed=3)).eval()


def test_log_probs_are_renormalized_per_token():
    model = product()
    ids = torch.tensor([[0, 3, 4, 5], [0, 5, 5, 2]])
    with torch.no_grad():
        parts = [part(input_ids=ids).logits.log_softmax(-1) for part in (model.lm, model.residual)]
        expected = (parts[0] + parts[1]).log_softmax(-1)
        found = model(input_ids=ids, labels=ids.masked_fill(ids == 0, -100))
    torch.testing.assert_close(found.logits.double(), expected, rtol=1e-5, atol=1e-5)
    nats = -expected[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert float(found.loss) == pytest.approx(float(nats.mean()), rel=1e-5)
    total = exact_log_probs(model, PREFIX).exp().sum()
    assert float(total) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gpt_neox"])
def test_from_a_model_alone_it_starts_as_that_model(family, tmp_path):
    lm = tiny_causal(family, dtype=torch.float32)
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    model = ProductLM.from_lm(lm).eval()
    ids = torch.tensor([[0, 3, 4, 5, 6]])
    torch.testing.assert_close(model(input_ids=ids).logits, lm(input_ids=ids).logits.log_softmax(-1), atol=1e-5, rtol=0)
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    assert not model.lm.training and all(parameter.grad is None for parameter in model.lm.parameters())
    with torch.no_grad():
        model.residual.get_output_embeddings().weight -= 0.5 * model.residual.get_output_embeddings().weight.grad
    assert float(model(input_ids=ids, labels=ids).loss) < float(loss)
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    model.eval().save_pretrained(tmp_path)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    assert all(not parameter.requires_grad for parameter in again.lm.parameters())
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_generation_follows_its_own_logits():
    model = product()
    row = torch.tensor([[0, 3, 4]])
    found = model.generate(row, max_new_tokens=6, do_sample=False)
    for _ in range(6):
        if int(row[0, -1]) != 1:
            row = torch.cat([row, model(input_ids=row).logits[:, -1].argmax(-1)[:, None]], 1)
    assert found[0].tolist() == row[0].tolist()
    # Rows of unequal length are padded on the left.
    padded = torch.tensor([[2, 2, 0], [0, 3, 4]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    together = model.generate(padded, attention_mask=mask, max_new_tokens=4, do_sample=False)
    alone = model.generate(torch.tensor([[0]]), max_new_tokens=4, do_sample=False)
    ends = alone[0, 1:].tolist()
    assert together[0, 3 : 3 + len(ends)].tolist() == ends


def test_models_that_count_positions_after_padding_are_left_to_do_so():
    torch.manual_seed(0)
    config = tf.RobertaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        is_decoder=True, pad_token_id=2, max_position_embeddings=30,
    )  # fmt: skip
    model = ProductLM.from_lm(tf.RobertaForCausalLM(config).eval()).eval()
    row = torch.tensor([[0, 5, 6, 7]])
    alone = model(input_ids=row).logits
    torch.testing.assert_close(model(input_ids=row, attention_mask=torch.ones_like(row)).logits, alone)
    padded = torch.tensor([[2, 2, 0, 5, 6, 7]])
    found = model(input_ids=padded, attention_mask=(padded != 2).long()).logits[:, 2:]
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def test_accumulation_changes_no_gradient(tmp_path):
    rows = [{"input_ids": [0, 3, 4, 5], "attention_mask": [1] * 4, "labels": [-100, 3, 4, 5]}] * 4
    found = []
    for size, steps in ((4, 1), (1, 4)):
        model = ProductLM(toy_lm(dtype=torch.float32), toy_lm(seed=3, dtype=torch.float32))
        args = tf.TrainingArguments(
            str(tmp_path), max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=steps,
            optim="sgd", learning_rate=0.1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
            max_grad_norm=0.0,
        )  # fmt: skip
        tf.Trainer(model, args, train_dataset=rows).train()
        found.append(model.residual.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-6, rtol=1e-5)


def test_checkpoints_without_all_weights_are_refused(tmp_path):
    toy_lm().save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match="has no weights for"):
        ProductLM.from_pretrained(tmp_path / "lm", config=product().config)  # by default GPT-2's size


def test_other_models_are_refused():
    lm = toy_lm()
    with pytest.raises(ValueError, match="must have one data type"):
        ProductLM(lm, toy_lm(seed=3, dtype=torch.float32))
    with pytest.raises(ValueError, match="must not share weights"):
        ProductLM(lm, lm)
    with pytest.raises(ValueError, match="residual must be a causal language model, got NoneType"):
        ProductLM(lm)
    with pytest.raises(ValueError, match="resize both language models"):
        product().resize_token_embeddings(9)


def test_different_vocabularies_are_refused():
    with pytest.raises(ValueError, match="must have one vocabulary, got 6 and 9 ids"):
        ProductLM(toy_lm(), toy_lm(9))
