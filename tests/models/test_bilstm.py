"""The recurrent masked language model against plain loops over its two LSTMs."""

import itertools

import pytest
import torch
from transformers import AutoModelForMaskedLM

from hf_ebm import BiLSTMForMaskedLM, BiLSTMMaskedLMConfig, EnergyModel
from hf_ebm.exact import energies_from_contexts
from hf_ebm.models.lstm.modeling_bilstm import factored_log_partition

ROLES = dict(
    mask_token_id=3, pad_token_id=0, special_token_ids=[0, 1, 2], excluded_token_ids=[], prefix_token_ids=[1],
    suffix_token_ids=[2],
)  # fmt: skip


def tiny_bilstm(vocab_size: int = 9, dtype=torch.float64, seed: int = 0) -> BiLSTMForMaskedLM:
    torch.manual_seed(seed)
    model = BiLSTMForMaskedLM(BiLSTMMaskedLMConfig(vocab_size=vocab_size, embedding_dim=6, hidden_size=12)).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.5)
    return model.eval()


def test_logits_are_of_the_other_tokens_alone():
    model, ids = tiny_bilstm(), torch.tensor([[1, 5, 6, 7, 2], [1, 4, 4, 8, 2]])
    logits = model(ids).logits
    embeds, half = model.bilstm.embed_tokens, model.config.hidden_size // 2
    for row, t in itertools.product(range(2), range(5)):
        parts = []
        for lstm, context in ((model.bilstm.left, ids[row, :t]), (model.bilstm.right, ids[row, t + 1 :].flip(0))):
            parts.append(lstm(embeds(context)[None])[0][0, -1] if len(context) else torch.zeros(half).double())
        expected = model.lm_head(torch.cat(parts))
        torch.testing.assert_close(logits[row, t], expected)
        changed = ids.clone()
        changed[row, t] = 3
        torch.testing.assert_close(model(changed).logits[row, t], logits[row, t])


def test_padding_changes_nothing_and_stands_on_the_right():
    model, ids = tiny_bilstm(), torch.tensor([[1, 5, 6, 2]])
    padded = torch.tensor([[1, 5, 6, 2, 0, 0], [1, 5, 6, 7, 8, 2]])
    found = model(padded, (padded != 0).long()).logits
    torch.testing.assert_close(found[0, :4], model(ids).logits[0])
    with pytest.raises(ValueError, match="must be ones followed by zeros"):
        model(padded.flip(1), (padded.flip(1) != 0).long())


@pytest.mark.parametrize("length", [1, 2, 4])
def test_all_contexts_at_once_give_the_energies_of_all_sequences(length):
    model = tiny_bilstm()
    energy_model = EnergyModel(model, energy="raw", **ROLES)
    tokens = torch.tensor([4, 6, 8])
    space = torch.tensor(list(itertools.product(tokens.tolist(), repeat=length)))
    ends = [torch.full((len(space), 1), i) for i in (1, 2)]
    expected = energy_model(input_ids=torch.cat([ends[0], space, ends[1]], 1)).energy
    tables = [table[:, tokens] for table in model.context_logits([1], [2], tokens, length)]
    torch.testing.assert_close(energies_from_contexts(tables).flatten(), expected)


def test_round_trip_and_auto_class(tmp_path):
    model = tiny_bilstm(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(again) is BiLSTMForMaskedLM
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    energy_model = EnergyModel.from_pretrained(tmp_path, energy="raw", **ROLES)
    out = energy_model.generate(lengths=3, num_chains=2, num_epochs=3, seed=0)
    assert out.sequences.shape == (2, 5)


def test_the_loss_is_the_cross_entropy_of_its_labels():
    model, ids = tiny_bilstm(), torch.tensor([[1, 5, 6, 7, 2]])
    labels = torch.tensor([[-100, 5, -100, 7, -100]])
    out = model(ids, labels=labels)
    expected = -out.logits.float().log_softmax(-1)[0, [1, 3], [5, 7]].mean()
    assert float(out.loss.detach()) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("settings", [{"hidden_size": 7}, {"dropout": 1.0}, {"vocab_size": 0}, {"pad_token_id": 99}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        BiLSTMMaskedLMConfig(**{"vocab_size": 20, **settings})


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("frame", [([1], [2]), ([], []), ([1, 7], [5, 2])])
def test_log_partition_by_factors_equals_enumeration(length, frame):
    model, tokens = tiny_bilstm(), torch.tensor([4, 6, 8])
    tables = [table[:, tokens] for table in model.context_logits(*frame, tokens, length)]
    expected = float((-energies_from_contexts(tables)).flatten().logsumexp(0))
    assert factored_log_partition(model, *frame, tokens, length) == pytest.approx(expected, abs=1e-10)
