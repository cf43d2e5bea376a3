"""Energies, their gradients, scores and chains on a card, with inputs, energies and criteria from either side."""

import itertools

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, StoppingCriteria

from hf_ebm import BiLSTMForMaskedLM, BiLSTMMaskedLMConfig, EnergyModel, TextEnergy
from hf_ebm.sampling.blocks import LAYOUTS, ORDERS
from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.sampling.proposals import FILLS
from hf_ebm.sampling.warm_start import DECODERS, WARM_STARTS
from hf_ebm.scoring.energies import ENERGIES
from hf_ebm.scoring.masking import MASKINGS
from tests.conftest import tiny_energy_model
from tests.device.conftest import agree
from tests.models.tokenizers_for_tests import small_model, small_tokenizer

RIGHT = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 5, 2, 0], [1, 6, 2, 0, 0]])
LEFT = torch.tensor([[1, 5, 6, 7, 2], [0, 1, 8, 5, 2], [0, 0, 1, 6, 2]])
PROMPTS = torch.tensor([[1, 5, 3, 7, 3, 2], [1, 3, 5, 3, 2, 0]])
BASE = dict(num_chains=3, num_epochs=3, seed=7)
PAIRS = dict(block_size=2, block_fill="sequential", block_layout="contiguous", delayed_acceptance=1)


def bilstm() -> EnergyModel:
    torch.manual_seed(0)
    mlm = BiLSTMForMaskedLM(BiLSTMMaskedLMConfig(vocab_size=9, embedding_dim=6, hidden_size=8, pad_token_id=0))
    roles = dict(pad_token_id=0, special_token_ids=[0, 1, 2], excluded_token_ids=[4])
    return EnergyModel(mlm, mask_token_id=3, prefix_token_ids=[1], suffix_token_ids=[2], **roles).eval()


def chains(out):
    return [out.samples, out.energies, out.satisfied, out.trace, out.attention_mask, out.num_masked_rows]


@pytest.mark.parametrize("energy", ENERGIES)
def test_energies_and_gradients(energy):
    def of(device):
        model = tiny_energy_model(energy, layers=2).to(device)
        found = []
        for ids in (RIGHT, LEFT, RIGHT.to(device), LEFT.to(device)):
            out = model(input_ids=ids, attention_mask=(ids != 0).long())
            assert out.energy.device == torch.device(device)
            out.energy.sum().backward()
            found += [out.energy, out.token_energies]
        return found, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    agree(of)


def test_gradients_of_an_energy_of_recurrent_nets_in_evaluation_mode():
    def of(device):
        model = bilstm().to(device)
        model(input_ids=RIGHT, attention_mask=(RIGHT != 0).long()).energy.sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    agree(of)


@pytest.mark.parametrize("masking", MASKINGS)
def test_scores(masking):
    words = torch.tensor([[0, 1, 1, 2, 3], [0, 1, 1, 2, -1], [0, 1, 2, -1, -1]])

    def of(device):
        model = tiny_energy_model().to(device)
        given = [part.to(device) for part in (RIGHT, (RIGHT != 0).long(), words)]
        found = []
        for ids, mask, of_words in (given, (RIGHT, (RIGHT != 0).long(), words)):
            options = dict(words=of_words) if masking == "within_word_l2r" else {}
            found.append(model.score_ids(ids, mask, masking=masking, stride=2, token_budget=20, **options))
            found.append(model.score_ids(ids, mask, mask * (ids != 5), masking=masking, **options))
        return found

    agree(of)


# Every entry of every table, and what masks other rows or waits for numbers of them.
BLOCKS = [
    {"block_size": 2, "block_fill": fill, "block_layout": layout, "order": order, "exclude_current": order == "random"}
    for fill, layout, order in itertools.product(FILLS, LAYOUTS, ORDERS)
]
SETTINGS = [
    *({"kernel": name} for name in KERNELS),
    *({"decoder": name} for name in DECODERS),
    *({"warm_start": name} for name in WARM_STARTS),
    *BLOCKS,
    {"kernel": "gibbs", "block_size": 2, "block_fill": "sequential", "proposal_top_k": 4},
    {"lengths": {3: 0.5, 5: 0.5}, "delayed_acceptance": 0},
    {**PAIRS, "block_size": [1, 3], "token_budget": 9},
    {"proposal_top_p": 0.8, "proposal_top_k": 2, "proposal_temperature": 0.7, "proposal_epsilon": 0.1, "block_size": 2},
    {"final_block_size": 1, "block_size": 3, "accept_all_epochs": 1, "burn_in": 1, "thinning": 2},
    {"energy_temperature": 2.0, "energy_temperature_decay": 0.5, "min_energy_temperature": 0.5, "suppress_tokens": [8]},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ", ".join(map(str, settings.values())))
def test_chains(settings):
    given = {"lengths": [5, 3], **BASE, **settings}
    agree(lambda device: chains(tiny_energy_model(layers=2).to(device).generate(**given)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts(side):
    ids = torch.tensor([[1, 5, 3, 7, 3, 2], [0, 1, 3, 5, 3, 2]]) if side == "left" else PROMPTS

    def of(device):
        model, mask = tiny_energy_model().to(device), (ids != 0).long()
        free = (ids == 3) | (ids == 7)
        found = []
        for a, b, c in itertools.product(("cpu", device), repeat=3):
            given = dict(input_ids=ids.to(a), attention_mask=mask.to(b), free_mask=free.to(c))
            found.append(chains(model.generate(**given, **{**BASE, "num_epochs": 1})))
        return found

    agree(of)


def on_its_side(ids):
    return (ids == 5).sum(1).float()


def on_the_cpu(ids):
    return (ids.cpu() == 5).sum(1).double()


def hard(ids):
    return torch.where((ids == 6).any(1), 0.0, torch.inf)


@pytest.mark.parametrize("extra", [on_its_side, on_the_cpu, hard, "texts"])
def test_extra_energies(extra):
    def of(device):
        if extra != "texts":
            model = tiny_energy_model().to(device)
            given, term = dict(lengths=[5, 3], **PAIRS), extra
        else:
            tokenizer = small_tokenizer("wordpiece")
            model = small_model(tokenizer).to(device)
            given = dict(tokenizer(["the [MASK] sat [MASK]", "[MASK] dog"], return_tensors="pt", padding=True))
            term = TextEnergy(lambda texts: [0.1 * len(text) for text in texts], tokenizer)
        return chains(model.generate(**given, **BASE, extra_energies=[(1.5, term), (0.5, on_its_side)]))

    agree(of)


def test_logits_processors():
    processors = [MinPLogitsWarper(0.01), RepetitionPenaltyLogitsProcessor(1.1)]
    settings = dict(lengths=[5, 3], logits_processor=processors, proposal_epsilon=0.1, block_size=2)
    agree(lambda device: chains(tiny_energy_model().to(device).generate(**BASE, **settings)))


class Stopped(StoppingCriteria):
    """Where a token is in, said on one side or the other."""

    def __init__(self, on_cpu: bool):
        self.on_cpu = on_cpu

    def __call__(self, input_ids, scores):
        return (input_ids.cpu() if self.on_cpu else input_ids).eq(5).any(1)


@pytest.mark.parametrize("sides", [[False], [True], [False, True]], ids=str)
def test_stopping_criteria(sides):
    criteria = [Stopped(on_cpu) for on_cpu in sides]
    agree(lambda d: chains(tiny_energy_model().to(d).generate(lengths=[5, 3], **BASE, stopping_criteria=criteria)))


class Streamer:
    def __init__(self):
        self.got = []

    def put(self, value):
        assert value.device.type == "cpu"
        self.got.append(value.clone())

    put_draft = put

    def end(self):
        pass


def test_streamers_get_tokens_on_the_cpu():
    def of(device):
        streamer = Streamer()
        tiny_energy_model().to(device).generate(lengths=[5, 3], **BASE, streamer=streamer)
        return streamer.got

    agree(of)


@pytest.mark.parametrize("settings", [{}, PAIRS, {"kernel": "gibbs"}], ids=["defaults", "pairs", "gibbs"])
def test_a_run_goes_on_from_either_side(settings, tmp_path):
    def of(device):
        found = []
        for first, then in ("cpu", device), (device, "cpu"):
            folder, given = tmp_path / f"{device}-{len(found)}", {"lengths": [4, 3], **BASE, **settings}
            tiny_energy_model().to(first).generate(**{**given, "num_epochs": 1}, save_state_to=folder)
            found.append(chains(tiny_energy_model().to(then).generate(resume_from=folder, num_epochs=2)))
        return found

    agree(of)


def test_half_precision():
    agree(lambda d: tiny_energy_model(dtype=torch.bfloat16).to(d).score_ids(RIGHT, (RIGHT != 0).long()).float(), 0.05)
