"""Readers of corpora: what they read, what they leave out and what they refuse."""

import pytest

from hf_ebm.data.corpora import load_conll2003, load_parallel_text, load_tag_files


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, text: str, encoding: str = "utf-8"):
        (tmp_path / name).write_bytes(text.encode(encoding))
        return tmp_path / name

    return write_file


ENGLISH = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O


-DOCSTART- -X- O O

Peter NNP I-NP I-PER"""


def test_conll_sentences_end_at_blank_lines_and_documents(write):
    path = write("train.txt", ENGLISH)
    dataset = load_conll2003({"train": path, "dev": str(path)})
    assert dataset["train"].to_list() == [
        {"source": "EU rejects", "target": "I-ORG O"},
        {"source": "Peter", "target": "I-PER"},
    ]
    assert dataset["dev"].to_list() == dataset["train"].to_list()
    assert load_conll2003({"train": path}, tag_column=1)["train"]["target"][:] == ["NNP VBZ", "NNP"]


def test_conll_german_has_five_columns_and_its_own_encoding(write):
    path = write("deu.train", "Jörg Jörg NE I-PC I-PER\r\nmuß müssen VMFIN I-VC O\r\n\r\n", "latin-1")
    dataset = load_conll2003({"train": path}, encoding="latin-1")
    assert dataset["train"].to_list() == [{"source": "Jörg muß", "target": "I-PER O"}]
    with pytest.raises(ValueError, match=r"deu\.train, line 1: not utf-8"):
        load_conll2003({"train": path})
    with pytest.raises(ValueError, match="encoding must be one that Python knows, got 'latein'"):
        load_conll2003({"train": path}, encoding="latein")


def test_conll_refuses_malformed_lines_and_columns(write):
    path = write("bad.txt", "EU NNP I-NP I-ORG\nrejects VBZ O\n")
    with pytest.raises(ValueError, match=r"bad\.txt, line 2: .* got 3 where the first line has 4: 'rejects VBZ O'"):
        load_conll2003({"train": path})
    for column in (0, 4, -4, -5):
        with pytest.raises(ValueError, match=rf"tag_column must be from 1 to 3 or from -3 to -1 .* got {column}"):
            load_conll2003({"train": write("good.txt", ENGLISH)}, tag_column=column)
    with pytest.raises(ValueError, match="tag_column must be a whole number, got 'ner'"):
        load_conll2003({"train": path}, tag_column="ner")
    with pytest.raises(ValueError, match=r"line 1: .* two or more, got 1"):
        load_conll2003({"train": write("words.txt", "EU\nrejects\n")})
    with pytest.raises(ValueError, match="nothing but blank lines or metadata for split 'dev'"):
        load_conll2003({"dev": write("empty.txt", "-DOCSTART- -X- O O\n\n")})


@pytest.mark.parametrize("files", [{}, "train.txt", None])
def test_files_are_checked(files):
    with pytest.raises(ValueError, match="files must be a dict of split to path"):
        load_conll2003(files)
    with pytest.raises(ValueError, match="target_files must be a dict of split to path"):
        load_parallel_text({"train": "a"}, files)


def test_supertags_are_the_last_field(write):
    dataset = load_tag_files(
        {
            "train": write("pos.txt", "Pierre|NNP|N/N Vinken|NNP|N\n\n’s|POS|(NP/N)\\NP\n"),
            "test": write("plain.txt", "runs|S\\NP .|.\n"),
        }
    )
    assert dataset["train"].to_list() == [
        {"source": "Pierre Vinken", "target": "N/N N"},
        {"source": "’s", "target": "(NP/N)\\NP"},
    ]
    assert dataset["test"].to_list() == [{"source": "runs .", "target": "S\\NP ."}]
    underscored = load_tag_files({"train": write("under.txt", "a__N b__NP\n")}, separator="__")
    assert underscored["train"].to_list() == [{"source": "a b", "target": "N NP"}]


@pytest.mark.parametrize("line", ["a", "a|N b|N|N", "|N", "a|"])
def test_supertags_refuse_malformed_tokens(write, line):
    with pytest.raises(ValueError, match=r"tags\.txt, line 2: every token needs a word, a tag"):
        load_tag_files({"train": write("tags.txt", f"a|N\n{line}\n")})


@pytest.mark.parametrize("separator", ["", " ", "a b", None])
def test_separator_is_checked(write, separator):
    with pytest.raises(ValueError, match="separator must be a text without white space"):
        load_tag_files({"train": write("tags.txt", "a|N\n")}, separator=separator)


def test_plain_parallel_text_drops_half_empty_pairs_and_keeps_unusual_characters(write):
    # U+2028 and U+0085 are no ends of lines here, and "<3" is no tag.
    source = write("a.de", "\ufeffeins\u2028zwei \n\ndrei\n<3 vier\n")
    target = write("a.en", "one\u0085two\nlost\nthree\n< four")
    dataset = load_parallel_text({"train": source}, {"train": target})
    assert dataset["train"].to_list() == [
        {"source": "eins zwei", "target": "one two"},
        {"source": "drei", "target": "three"},
        {"source": "<3 vier", "target": "< four"},
    ]


def test_iwslt_metadata_are_taken_out_of_each_side(write):
    source = write("train.tags.de-en.de", "<url>u</url>\n<title>T</title>\n Danke . \nHallo & \n<url>v</url>\nJa .\n")
    target = write(
        "train.tags.de-en.en",
        "<url>u</url>\n<title>T</title>\n<translator href='x'>X</translator>\nThanks .\nHello &\n<url>v</url>\nYes .\n",
    )
    dataset = load_parallel_text({"train": source}, {"train": target})
    assert dataset["train"].to_list() == [
        {"source": "Danke .", "target": "Thanks ."},
        {"source": "Hallo &", "target": "Hello &"},
        {"source": "Ja .", "target": "Yes ."},
    ]


def test_iwslt_segments_are_text(write):
    head = '<?xml version="1.0"?>\n<mteval>\n<doc docid="1">\n'
    source = write("dev.de.xml", head + '<seg id="1"> A &amp; B </seg>\n<seg id="2"> C </seg>\n</doc>\n</mteval>\n')
    target = write("dev.en.xml", head + '<seg id="1"> D </seg>\n<seg id="2"> &lt;E&gt; </seg>\n</doc>\n</mteval>\n')
    dataset = load_parallel_text({"dev": source}, {"dev": target})
    assert dataset["dev"].to_list() == [{"source": "A & B", "target": "D"}, {"source": "C", "target": "<E>"}]
    broken = write("broken.xml", head + '<seg id="1"> A\n</seg>\n')
    with pytest.raises(ValueError, match=r"broken\.xml, line 4: .*</seg>"):
        load_parallel_text({"dev": source}, {"dev": broken})


def test_misaligned_text_is_refused(write):
    source = write("a.de", "eins\nzwei\n")
    with pytest.raises(ValueError, match=r"equally many lines of text, got 2 in .*a\.de and 3 in .*a\.en"):
        load_parallel_text({"train": source}, {"train": write("a.en", "one\ntwo\nthree\n")})
    with pytest.raises(ValueError, match=r"same splits, got \['train'\] and \['test'\]"):
        load_parallel_text({"train": source}, {"test": source})
    # As many lines on both sides, but a tag in the wrong place: without the check by talks, rows would be shifted.
    shifted = write("b.de", "<url>u</url>\na\nb\n<url>v</url>\nc\n"), write("b.en", "<url>u</url>\na\n<br>\nb\nc\n")
    with pytest.raises(ValueError, match=r"got 2 from .*b\.de, line 2, and 1 from .*b\.en, line 2"):
        load_parallel_text({"train": shifted[0]}, {"train": shifted[1]})
