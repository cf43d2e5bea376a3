"""Scores of variants against one masked row at a time, on BERT, RoBERTa, ESM and ALBERT shapes."""

import itertools

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import EsmTokenizer, PreTrainedTokenizerFast

from hf_ebm import EnergyModel
from hf_ebm.models.energy.configuration_energy import token_roles
from hf_ebm.models.energy.mutations_energy import Change, parse_variant
from hf_ebm.scoring.mutations import SCHEMES
from tests.models.families import tiny_family_model

SPECIAL = ["<pad>", "<cls>", "<eos>", "<mask>", "<unk>"]
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
REFERENCE = "MKTAYIAK"
SINGLE = ["K2R", "K2E", "A7G", "K2R"]
VARIANTS = [*SINGLE, "K2R:A7G", "M1L:K2R:K8A", "T3T"]


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A token a letter, which are words for it."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("<cls>", 1), ("<eos>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<cls> $A <eos>", special_tokens=ends)
    names = ("pad_token", "cls_token", "sep_token", "mask_token", "unk_token")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, SPECIAL, strict=True)))


def esm_tokenizer(folder) -> EsmTokenizer:
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *LETTERS]))
    return EsmTokenizer(str(folder / "vocab.txt"))


@pytest.fixture(params=["bert", "roberta", "esm", "albert"])
def model_and_tokenizer(request, tmp_path):
    tokenizer = esm_tokenizer(tmp_path) if request.param == "esm" else letter_tokenizer()
    mlm = tiny_family_model(request.param, vocab_size=len(tokenizer), mask_token_id=tokenizer.mask_token_id)
    return EnergyModel(mlm, **token_roles(tokenizer, len(tokenizer))).eval(), tokenizer


@pytest.fixture
def bert():
    tokenizer = letter_tokenizer()
    mlm = tiny_family_model("bert", vocab_size=len(tokenizer))
    return EnergyModel(mlm, **token_roles(tokenizer, len(tokenizer))).eval(), tokenizer


def log_prob(model, tokenizer, shown: str, masked, place: int, letter: str) -> float:
    """Of a letter at a place, others masked: one row, without the library."""
    ids = torch.tensor([[1, *tokenizer.convert_tokens_to_ids(list(shown)), 2]])
    for other in masked:
        ids[0, other + 1] = tokenizer.mask_token_id
    with torch.no_grad():
        logits = model.mlm(input_ids=ids).logits[0, place + 1].double()
    return float(logits.log_softmax(-1)[tokenizer.convert_tokens_to_ids(letter)])


def mutant_of(variant: str) -> tuple[str, list[int]]:
    letters = list(REFERENCE)
    sites = []
    for change in variant.split(":"):
        sites.append(int(change[1:-1]) - 1)
        letters[sites[-1]] = change[-1]
    return "".join(letters), sites


def plain_score(of, scheme: str, variant: str) -> float:
    mutant, sites = mutant_of(variant)

    def ratio(shown: str, masked_at):
        return sum(
            log_prob(*of, shown, masked_at(s), s, mutant[s]) - log_prob(*of, shown, masked_at(s), s, REFERENCE[s])
            for s in sites
        )

    def pseudo_log_likelihood(text: str, places) -> float:
        return sum(log_prob(*of, text, [s], s, text[s]) for s in places)

    if scheme == "joint":
        return pseudo_log_likelihood(mutant, sites) - pseudo_log_likelihood(REFERENCE, sites)
    if scheme == "pseudo_likelihood_ratio":
        return pseudo_log_likelihood(mutant, range(8)) - pseudo_log_likelihood(REFERENCE, range(8))
    shown = mutant if scheme == "mutant_marginals" else REFERENCE
    masked = {"masked_marginals": lambda s: [s], "masked_marginals_together": lambda s: sites}
    return ratio(shown, masked.get(scheme, lambda s: []))


# Of `VARIANTS`: sites 1, 2, 7 and 8; sets {2}, {7}, {2, 7}, {1, 2, 8}; five different mutants.
ROWS = {
    "masked_marginals": 4, "masked_marginals_together": 4, "wild_type_marginals": 1, "mutant_marginals": 5,
    "joint": 4 + 2 + 3, "pseudo_likelihood_ratio": 6 * 8,
}  # fmt: skip


@pytest.mark.parametrize("scheme", ROWS)
def test_scores_are_those_of_a_plain_loop_from_fewer_rows(scheme, model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    found = model.score_variants(REFERENCE, VARIANTS, tokenizer, scheme=scheme)
    plain = [plain_score((model, tokenizer), scheme, variant) for variant in VARIANTS]
    assert found.scores.tolist() == pytest.approx(plain, abs=1e-5)
    assert found.num_rows == ROWS[scheme]


def test_the_joint_distribution_is_that_of_all_mutants(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    variants = ["K2R:A7G", "K2A:A7K", "A7G"]
    scores = model.score_variants(REFERENCE, variants, tokenizer, scheme="joint_log_prob", letters="KARG").scores
    pairs = [f"K2{one}:A7{other}" for one, other in itertools.product("KARG", repeat=2)]
    ratios = {pair: plain_score((model, tokenizer), "joint", pair) for pair in pairs}
    log_z = torch.tensor(list(ratios.values()), dtype=torch.float64).logsumexp(0)
    single = torch.tensor([plain_score((model, tokenizer), "joint", f"A7{letter}") for letter in "GKAR"]).log_softmax(0)
    expected = [ratios["K2R:A7G"] - log_z, ratios["K2A:A7K"] - log_z, single[0]]
    assert scores.tolist() == pytest.approx([float(value) for value in expected], abs=1e-5)


def test_the_sampled_joint_distribution_has_an_error(bert):
    model, tokenizer = bert
    variants = ["K2R:A4G:A7G", "K2A:A7K", "K2R:A7G", "A7G"]
    exact = model.score_variants(REFERENCE, variants, tokenizer, scheme="joint_log_prob", letters="KARG").scores
    estimates = [
        model.score_variants(
            REFERENCE, variants, tokenizer, scheme="sampled_joint_log_prob", letters="KARG", num_draws=30, seed=seed
        )
        for seed in range(8)
    ]
    scores, errors = (torch.stack([getattr(own, name) for own in estimates]) for name in ("scores", "errors"))
    assert ((scores.mean(0) - exact).abs() < 4 * scores.std(0) / 8**0.5 + 1e-6).all()
    ratio = errors[:, :3].mean(0) / scores[:, :3].std(0)
    assert (ratio > 0.4).all() and (ratio < 2.5).all() and (errors[:, :3] > 1e-3).all()
    assert torch.allclose(scores[:, 3], exact[3].expand(8), atol=1e-5)  # one site is drawn from its own distribution
    # A set of sites has one estimate, so differences are exact.
    assert torch.allclose(scores[:, 1] - scores[:, 2], (exact[1] - exact[2]).expand(8), atol=1e-5)
    alone = model.score_variants(
        REFERENCE, variants[2:3], tokenizer, scheme="sampled_joint_log_prob", letters="KARG", num_draws=30, seed=3
    )
    assert float(alone.scores[0]) == pytest.approx(float(scores[3, 2]), abs=1e-6)


def test_a_single_site_of_the_sampled_joint_distribution_takes_one_row(bert):
    model, tokenizer = bert
    variants, scheme = ["K2R", "K2A", "A7G"], "sampled_joint_log_prob"
    found = model.score_variants(REFERENCE, variants, tokenizer, scheme=scheme, letters="KARG")
    exact = model.score_variants(REFERENCE, variants, tokenizer, scheme="joint_log_prob", letters="KARG")
    assert torch.equal(found.scores, exact.scores) and not found.errors.any() and int(found.num_rows) == 2


def test_insertions_and_deletions_by_energies(bert):
    model, tokenizer = bert
    variants = ["T3del", "K2_A4del", "A4_Y5insGR", "T3_A4delinsR", "K2del:A4_Y5insG"]
    texts = ["MKAYIAK", "MYIAK", "MKTAGRYIAK", "MKRYIAK", "MTAGYIAK"]
    energies = model.score([" ".join(text) for text in [REFERENCE, *texts]], tokenizer).energy
    found = model.score_variants(REFERENCE, variants, tokenizer, scheme="pseudo_likelihood_ratio")
    assert found.scores.tolist() == pytest.approx((energies[0] - energies[1:]).tolist(), abs=1e-5)
    for scheme in set(SCHEMES) - {"pseudo_likelihood_ratio"}:
        with pytest.raises(ValueError, match=rf"row 1.*T3del.*{scheme}"):
            model.score_variants(REFERENCE, ["K2R", "T3del"], tokenizer, scheme=scheme)


def test_positions_count_from_an_offset(bert):
    model, tokenizer = bert
    shifted = model.score_variants(REFERENCE, ["K24R:A29G", "M23L"], tokenizer, offset=23).scores
    assert torch.equal(shifted, model.score_variants(REFERENCE, ["K2R:A7G", "M1L"], tokenizer).scores)
    assert parse_variant("K-1R", REFERENCE, offset=-2) == [Change(1, 2, "R")]


def test_raw_energies_and_numbers_of_other_batches(bert):
    model, tokenizer = bert
    expected = {scheme: model.score_variants(REFERENCE, SINGLE, tokenizer, scheme=scheme).scores for scheme in ROWS}
    for scheme, scores in expected.items():
        small = model.score_variants(REFERENCE, SINGLE, tokenizer, scheme=scheme, token_budget=12).scores
        assert torch.allclose(small, scores, atol=1e-5)
    model.config.energy = "raw"
    raw = model.score_variants(REFERENCE, SINGLE, tokenizer).scores  # normalizers cancel
    assert torch.allclose(raw, expected["masked_marginals"], atol=1e-5)
    assert model.score_variants(REFERENCE, [], tokenizer).scores.shape == (0,)


@pytest.mark.parametrize(
    "variant,names",
    [
        ("A2R", "'K' at position 2"),
        ("K9R", "1 to 8"),
        ("K0R", "1 to 8"),
        ("K2J", "'J'"),
        ("K2r", "'r'"),
        ("K2", "'K2'"),
        ("", "''"),
        ("K2R:K2E", "overlap"),
        ("T3_K2del", "ends before"),
        ("K2_A4insG", "neighbours"),
    ],
)
def test_refusals_name_the_row(variant, names, bert):
    model, tokenizer = bert
    with pytest.raises(ValueError, match=rf"variants: row 1: .*{names}"):
        model.score_variants(REFERENCE, ["K2R", variant], tokenizer, scheme="pseudo_likelihood_ratio")


def test_other_refusals(bert):
    model, tokenizer = bert
    with pytest.raises(ValueError, match=r"reference: .*'J' \(letter 3\)"):
        model.score_variants("MKJA", ["K2R"], tokenizer)
    with pytest.raises(ValueError, match="scheme"):
        model.score_variants(REFERENCE, ["K2R"], tokenizer, scheme="marginals")
    with pytest.raises(ValueError, match=r"row 0.*letters"):
        model.score_variants(REFERENCE, ["K2R"], tokenizer, scheme="joint_log_prob", letters="KA")
    every = ":".join(f"{letter}{place}G" for place, letter in enumerate(REFERENCE, 1))
    with pytest.raises(ValueError, match=r"row 0.*masked rows"):
        model.score_variants(REFERENCE, [every], tokenizer, scheme="joint_log_prob")
    with pytest.raises(ValueError, match=r"variants: row 0 has 203 tokens"):
        model.score_variants(REFERENCE, [f"K2_T3ins{'A' * 193}"], tokenizer, scheme="pseudo_likelihood_ratio")
