"""The tasks of chapters 3 to 5: their data, tokenizer, fresh models and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from hf_ebm.data.bibles import load_verse_pairs
from hf_ebm.data.cmudict_tasks import join_words, load_g2p, load_stress
from hf_ebm.data.metrics import ngram_overlap, stress_scores, transcription_scores
from hf_ebm.data.symbols import encode_pairs, num_target_ids, symbol_tokenizer
from hf_ebm.models.lstm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration
from hf_ebm.objectives.sequence_costs import meteor_without_synonyms_cost, sentence_bleu_cost

DEFAULT_LABEL = "0"  # an unstressed vowel, the commonest label of the positions that have to be decided
LENGTHS = [(3, 6), (6, 8), (8, 10), (10, 15)]  # letters, for the table by source length
PHRASES = (20, 30)  # symbols of the joined words of a phrase
PIECES = 2_000  # of the two languages together
WORD_START = "▁"


@dataclass(frozen=True)
class TaskKind:
    """What sets a task apart.

    `load` gives texts of space-separated symbols, `source` and `target`; `scores` takes predictions and rows.
    """

    load: Callable[[], DatasetDict]
    scores: Callable[[list[str], Dataset], dict[str, float]]
    selection: str  # the metric by which settings are chosen
    hidden: int
    longest: int  # tokens of an output
    max_train: int = 20_000  # rows: phrases have about as many symbols together as words
    tagging: bool = False  # one label for each symbol of the source
    pieces: bool = False  # symbols are pieces of words, of one vocabulary for both sides
    transformer: bool = False  # a small T5 in place of an LSTM


class Task:
    """Data, tokenizer, fresh models and metrics of a task.

    `max_train` and `held_out` rows, or the kind's `max_train`, or all that there are, where that is fewer.
    """

    def __init__(self, name: str, max_train: int, held_out: int):
        self.kind = TASKS[name]
        splits = self.kind.load()
        # Of all of train, whose small part may lack a rare one; pieces of train's words may meet in others first.
        symbols = {side: splits["train"][side] for side in ("source", "target")}
        if self.kind.pieces:
            symbols["target"] = [text for rows in splits.values() for side in symbols for text in rows[side]]
        for split, most in (
            ("train", min(max_train, self.kind.max_train)),
            ("validation", held_out),
            ("test", held_out),
        ):
            splits[split] = splits[split].select(range(min(most, len(splits[split]))))
        self.texts: DatasetDict = splits
        self.tokenizer = symbol_tokenizer(symbols["target"], symbols["source"], model_max_length=128)
        self.encoded = encode_pairs(splits, self.tokenizer)

    @cached_property
    def target_size(self) -> int:
        return num_target_ids(self.tokenizer)

    def fresh_model(self, bidirectional: bool, dropout: float) -> PreTrainedModel:
        """Fixed attention and a zero start for tagging, additive attention for transcription and translation."""
        tagging, hidden = self.kind.tagging, self.kind.hidden
        if self.kind.transformer:
            return T5ForConditionalGeneration(
                T5Config(
                    vocab_size=len(self.tokenizer), d_model=hidden, d_kv=hidden // 4, d_ff=4 * hidden, num_layers=3,
                    num_heads=4, dropout_rate=dropout, pad_token_id=self.tokenizer.pad_token_id,
                    eos_token_id=self.tokenizer.eos_token_id, decoder_start_token_id=self.tokenizer.pad_token_id,
                )
            )  # fmt: skip
        return LSTMSeq2SeqForConditionalGeneration(
            LSTMSeq2SeqConfig(
                vocab_size=len(self.tokenizer),
                decoder_vocab_size=self.target_size,
                embedding_dim=hidden // 2,
                decoder_embedding_dim=32 if tagging else hidden // 2,
                hidden_size=hidden,
                bidirectional=bidirectional,
                attention="fixed" if tagging else "additive",
                initial_state="zero" if tagging else "encoder",
                dropout=dropout,
            )
        )

    def label_weights(self, default_weight: float) -> list[float]:
        """Weight of each predicted token: of the default label, and 1."""
        weights = [1.0] * self.target_size
        weights[self.tokenizer.convert_tokens_to_ids(DEFAULT_LABEL)] = default_weight
        return weights


def tagging_metrics(predictions: list[str], rows: Dataset) -> dict[str, float]:
    """Accuracy and F1 of stress, per cent."""
    return {name: 100 * value for name, value in stress_scores(predictions, list(rows["target"])).items()}


def transcription_metrics(predictions: list[str], rows: Dataset) -> dict[str, float]:
    """BLEU, error rates, n-gram precisions and sentence metrics, per cent; `bleu 3-5` and so on by source length."""
    references = list(rows["references"])
    scores = _corpus_scores(predictions, references)
    lengths = [len(source.split()) for source in rows["source"]]
    for low, high in LENGTHS:
        chosen = [row for row, length in enumerate(lengths) if low <= length < high]
        if chosen:
            parts = [predictions[row] for row in chosen], [references[row] for row in chosen]
            scores[f"bleu {low}-{high - 1}"] = transcription_scores(*parts)["bleu"]
    return scores


def translation_metrics(predictions: list[str], rows: Dataset) -> dict[str, float]:
    """Of texts: sacrebleu's BLEU with its default tokenizer, 4-grams, chrF; sentence BLEU of the pieces; per cent."""
    from sacrebleu.metrics import BLEU, CHRF

    texts, references = [detokenized(text) for text in predictions], [[detokenized(text) for text in rows["target"]]]
    bleu = BLEU().corpus_score(texts, references)
    return {
        "bleu": bleu.score,
        "precision_4": bleu.precisions[3],
        "chrf": CHRF().corpus_score(texts, references).score,
        "sentence_bleu": 100 * (1 - float(sentence_bleu_cost(predictions, list(rows["target"])).mean())),
        "length_ratio": bleu.sys_len / bleu.ref_len,
    }


def _corpus_scores(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    scores = transcription_scores(predictions, references)
    scores = {name: value if name == "bleu" else 100 * value for name, value in scores.items()}
    scores |= ngram_overlap(predictions, references)
    for name, cost in (
        ("sentence_bleu", sentence_bleu_cost),
        ("meteor_without_synonyms", meteor_without_synonyms_cost),
    ):
        scores[name] = 100 * (1 - float(cost(predictions, references).mean()))
    return scores


def in_pieces(splits: DatasetDict, vocabulary: int) -> DatasetDict:
    """Texts as space-separated pieces of words (byte pair encoding, one vocabulary for both languages, of train)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(WORD_START), pre_tokenizers.Punctuation("isolated")]
    )
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False)
    tokenizer.train_from_iterator([*splits["train"]["source"], *splits["train"]["target"]], trainer)
    return splits.map(lambda row: {side: " ".join(tokenizer.encode(row[side]).tokens) for side in ("source", "target")})


def detokenized(pieces: str) -> str:
    """The text of space-separated pieces."""
    return pieces.replace(" ", "").replace(WORD_START, " ").strip()


def chrf(completions: list[str], references: list[str]) -> list[float]:
    """chrF of each text, from 0 to 1; texts are given as pieces."""
    from sacrebleu.metrics import CHRF

    score = CHRF().sentence_score
    pairs = zip(completions, references, strict=True)
    return [score(detokenized(text), [detokenized(reference)]).score / 100 for text, reference in pairs]


REWARDS: dict[str, str | Callable] = {"phoneme_error": "neg_phoneme_error", "chrf": chrf}
TASKS = {
    "stress": TaskKind(load_stress, tagging_metrics, "accuracy", 96, 20, tagging=True),
    "g2p": TaskKind(load_g2p, transcription_metrics, "bleu", 128, 20),
    "stress-phrases": TaskKind(
        lambda: join_words(load_stress(), *PHRASES),
        tagging_metrics,
        "accuracy",
        96,
        PHRASES[1] + 1,
        6_000,
        tagging=True,
    ),
    "g2p-phrases": TaskKind(lambda: join_words(load_g2p(), *PHRASES), transcription_metrics, "bleu", 128, 45, 6_000),
    "translation": TaskKind(
        lambda: in_pieces(load_verse_pairs(20), PIECES), translation_metrics, "bleu", 128, 60, pieces=True
    ),
}
for _name in ("g2p", "translation"):
    TASKS[f"{_name}-t5"] = replace(TASKS[_name], transformer=True)
