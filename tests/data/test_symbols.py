"""Tokenizers of symbols and encoded pairs: ids, round trips, and rows that are refused."""

import pytest
from datasets import Dataset, DatasetDict
from tokenizers import processors
from transformers import AutoTokenizer, BartConfig, DataCollatorForSeq2Seq

from hf_ebm.data.symbols import encode_completions, encode_pairs, num_target_ids, symbol_tokenizer
from tests.models.tokenizers_for_tests import small_tokenizer

SOURCES, TARGETS = ["HH AH L OW", "- OY"], ["- 0 - 1", "- 2"]
# 0-3 <pad> <s> </s> <unk>; 4-7 "-" "0" "1" "2"; then the sources' AH HH L OW OY
SYMBOLS = ["<pad>", "<s>", "</s>", "<unk>", "-", "0", "1", "2", "AH", "HH", "L", "OW", "OY"]


@pytest.fixture
def tokenizer():
    return symbol_tokenizer(TARGETS, SOURCES, model_max_length=6)


def pairs(*rows: tuple[str, str]) -> Dataset:
    return Dataset.from_dict({"source": [source for source, _ in rows], "target": [target for _, target in rows]})


def test_ids_are_special_then_targets_then_sources(tokenizer):
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == SYMBOLS
    assert num_target_ids(tokenizer) == 8
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (
        0,
        1,
        2,
        3,
    )


def test_every_text_ends_with_eos_and_decodes_to_itself(tokenizer):
    encoded = tokenizer("HH AH  L OW", text_target="- 0 - 1")
    assert encoded["input_ids"] == [9, 8, 10, 11, 2] and encoded["labels"] == [4, 5, 4, 6, 2]
    assert tokenizer.decode([1, 9, 8, 10, 11, 2, 0, 0], skip_special_tokens=True) == "HH AH L OW"
    assert tokenizer.batch_decode([[4, 5, 2], [2, 0, 0]], skip_special_tokens=True) == ["- 0", ""]
    padded = tokenizer(["OY", "OY L"], padding=True)
    assert padded["input_ids"] == [[12, 2, 0], [12, 10, 2]] and padded["attention_mask"] == [[1, 1, 0], [1, 1, 1]]


def test_punctuation_is_not_touched():
    tokenizer = symbol_tokenizer(["(S\\NP)/NP , .", "do n't"], ["a"])
    for text in ("(S\\NP)/NP , .", "do n't", "a ."):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_saving_changes_nothing(tokenizer, tmp_path, beside_a_model):
    if beside_a_model:
        BartConfig().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    for again in (loaded, AutoTokenizer.from_pretrained(tmp_path / "again")):
        assert again.get_vocab() == tokenizer.get_vocab()
        assert num_target_ids(again) == 8 and again.model_max_length == 6
        texts = ["HH AH L OW", "unheard - L"]
        assert again(texts, text_target=texts).data == tokenizer(texts, text_target=texts).data
        assert again.decode([9, 8, 2, 0], skip_special_tokens=True) == "HH AH"


def test_building_is_checked():
    for symbol in ("<pad>", "<s>", "</s>", "<unk>", "x<s>y"):
        with pytest.raises(ValueError, match=f"sources must not hold .*, got the symbol {symbol!r}"):
            symbol_tokenizer(["a"], [f"b {symbol}"])
        with pytest.raises(ValueError, match="targets must not hold"):
            symbol_tokenizer([symbol], ["b"])
    with pytest.raises(ValueError, match="targets must be a list of texts, got one text, 'a b'"):
        symbol_tokenizer("a b", ["c"])
    with pytest.raises(ValueError, match="targets must hold one symbol or more"):
        symbol_tokenizer([" "], ["c"])
    with pytest.raises(ValueError, match="model_max_length must be a whole number from 1 up, got 0"):
        symbol_tokenizer(["a"], ["b"], model_max_length=0)
    with pytest.raises(ValueError, match="tokenizer must come from symbol_tokenizer"):
        num_target_ids(small_tokenizer("wordpiece"))


def test_pairs_become_inputs_and_labels(tokenizer):
    rows = pairs(("HH AH L OW", "- 0 - 1"), ("never L", "- 2")).add_column("references", [["x"], ["y"]])
    expected = [
        {"input_ids": [9, 8, 10, 11, 2], "attention_mask": [1] * 5, "labels": [4, 5, 4, 6, 2]},
        {"input_ids": [3, 10, 2], "attention_mask": [1] * 3, "labels": [4, 7, 2]},
    ]
    assert encode_pairs(rows, tokenizer).to_list() == expected
    encoded = encode_pairs(DatasetDict(train=rows, test=rows.select([1])), tokenizer)
    assert encoded["train"].to_list() == expected and encoded["test"].to_list() == expected[1:]


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "metaspace"])
def test_pairs_work_with_tokenizers_of_other_kinds(kind):
    tokenizer = small_tokenizer(kind)
    encoded = encode_pairs(pairs(("the cat sat", "on the mat")), tokenizer)
    assert encoded.column_names == ["input_ids", "attention_mask", "labels"]
    assert encoded[0]["input_ids"] == tokenizer("the cat sat")["input_ids"]
    assert encoded[0]["labels"] == tokenizer(text_target="on the mat")["input_ids"]


def test_unknown_targets_of_other_tokenizers_are_refused():
    with pytest.raises(ValueError, match="target of row 1 holds '☂'"):
        encode_pairs(pairs(("the", "cat"), ("the", "dog ☂ cat")), small_tokenizer("wordpiece"))


@pytest.mark.parametrize("target", ["- 9", "- AH", "- <unk>"])
def test_unknown_targets_are_refused(tokenizer, target):
    symbol = target.split()[1]
    with pytest.raises(ValueError, match=f"target of row 1 of split 'dev' holds {symbol!r}, which is no target symbol"):
        encode_pairs(DatasetDict(dev=pairs(("L", "-"), ("L", target))), tokenizer)


def test_long_rows_are_refused_and_never_cut(tokenizer):
    rows = pairs(("L", "-"), ("L L L", "- - - - -"))
    assert len(encode_pairs(rows, tokenizer, max_source_length=4)[1]["labels"]) == 6
    with pytest.raises(ValueError, match="source of row 1 has 4 tokens, more than the 3 allowed"):
        encode_pairs(rows, tokenizer, max_source_length=3)
    with pytest.raises(ValueError, match="target of row 1 has 6 tokens, more than the 5 allowed"):
        encode_pairs(rows, tokenizer, max_target_length=5)
    with pytest.raises(ValueError, match="source of row 0 has 7 tokens, more than the 6 allowed"):  # model_max_length
        encode_pairs(pairs(("L " * 6, "-")), tokenizer)


def test_special_tokens_in_texts_are_refused(tokenizer):
    with pytest.raises(ValueError, match="source of row 0 holds '<pad>'"):
        encode_pairs(pairs(("L <pad>", "-")), tokenizer)
    with pytest.raises(ValueError, match=r"target of row 0 holds '\[SEP\]'"):
        encode_pairs(pairs(("the", "cat[SEP]")), small_tokenizer("wordpiece"))


def test_pairs_are_checked(tokenizer):
    with pytest.raises(ValueError, match=r"columns source and target, got .*\['text'\]"):
        encode_pairs(Dataset.from_dict({"text": ["a"]}), tokenizer)
    with pytest.raises(ValueError, match="got 0 rows"):
        encode_pairs(pairs(), tokenizer)
    with pytest.raises(ValueError, match="target of row 0 must be a text, got None"):
        encode_pairs(pairs(("L", None)), tokenizer)
    with pytest.raises(ValueError, match="max_target_length must be a whole number from 1 up, got 0"):
        encode_pairs(pairs(("L", "-")), tokenizer, max_target_length=0)


def framed(before: str, behind: str, kind: str = "bytes"):
    """A tokenizer that puts tokens around a text: Llama's `<s>`, GPT-2's nothing, its one token for start and end."""
    tokenizer = small_tokenizer(kind)
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in dict.fromkeys(f"{before} {behind}".split())]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A {behind}".split(), special_tokens=ends
    )
    tokenizer.eos_token = "</s>"
    return tokenizer


@pytest.mark.parametrize(
    "around", [("", ""), ("<s>", ""), ("<s>", "</s>"), ("</s>", ""), ("</s>", "</s>"), ("<s>", "<mask> </s>")]
)
def test_completions_are_prompt_target_and_end(around):
    tokenizer = framed(*around)
    prompt, target = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the cat", " sat on"))
    end = tokenizer.eos_token_id
    before = tokenizer.convert_tokens_to_ids(around[0].split())
    kept = tokenizer.convert_tokens_to_ids([token for token in around[1].split() if token != "</s>"])
    (row,) = encode_completions(pairs(("the cat", " sat on")), tokenizer, end)
    assert row["input_ids"] == [*before, *prompt, *kept, *target, end]
    assert row["labels"] == [-100] * len([*before, *prompt, *kept]) + [*target, end]
    assert row["attention_mask"] == [1] * len(row["input_ids"])
    assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == "the cat sat on"
    if before:  # is a prompt by itself
        (row,) = encode_completions(pairs(("", " sat on")), tokenizer, end)
        assert row["input_ids"] == [*before, *kept, *target, end]


def test_completions_of_other_tokenizers(tokenizer):
    (row,) = encode_completions(pairs(("HH AH", "- 0")), tokenizer, 2)
    assert (row["input_ids"], row["labels"]) == ([9, 8, 4, 5, 2], [-100, -100, 4, 5, 2])
    wordpiece = small_tokenizer("wordpiece")
    (row,) = encode_completions(pairs(("the cat", "on the mat")), wordpiece, wordpiece.sep_token_id)
    assert row["input_ids"] == [*wordpiece("the cat")["input_ids"][:-1], *wordpiece("on the mat")["input_ids"][1:]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_completions_are_padded(tokenizer, side):
    tokenizer.padding_side = side
    rows = encode_completions(pairs(("HH AH", "- 0"), ("L", "-")), tokenizer, 2)
    batch = DataCollatorForSeq2Seq(tokenizer)([dict(row) for row in rows])
    assert batch["input_ids"].tolist()[1] == ([0, 0, 10, 4, 2] if side == "left" else [10, 4, 2, 0, 0])
    assert batch["labels"].tolist()[1] == ([-100] * 3 + [4, 2] if side == "left" else [-100, 4, 2, -100, -100])
    assert batch["attention_mask"].tolist()[1] == ([0, 0, 1, 1, 1] if side == "left" else [1, 1, 1, 0, 0])


def test_completions_are_checked(tokenizer):
    rows = pairs(("L", "-"), ("L L L", "- - -"))
    assert len(encode_completions(rows, tokenizer, 2, 3, 4, 7)) == 2
    for limits, message in {
        (2, 4, 7): "source of row 1 has 3 tokens, more than the 2 allowed",
        (3, 3, 7): "target of row 1 has 4 tokens, more than the 3 allowed",
        (3, 4, 6): "row 1 has 3 source and 4 target tokens, together more than the 6 allowed",
        (None, None, None): "row 1 has 3 source and 4 target tokens, together more than the 6",  # model_max_length
        (None, None, 0): "max_length must be a whole number from 1 up, got 0",
    }.items():
        with pytest.raises(ValueError, match=message):
            encode_completions(rows, tokenizer, 2, *limits)
    with pytest.raises(ValueError, match="source of row 1 of split 'dev' has no token"):
        encode_completions(DatasetDict(dev=pairs(("L", "-"), ("", "-"))), tokenizer, 2)
    with pytest.raises(ValueError, match="target of row 0 holds '0', which would end it"):
        encode_completions(pairs(("L", "- 0 -")), tokenizer, 5)
    with pytest.raises(ValueError, match="target of row 0 holds 'AH', which is no target symbol"):
        encode_completions(pairs(("L", "AH")), tokenizer, 2)
    with pytest.raises(ValueError, match="source of row 0 holds '</s>'"):
        encode_completions(pairs(("L </s>", "-")), tokenizer, 2)
