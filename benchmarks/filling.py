"""Exact joint fills of two blanks and a whole vocabulary: `EnergyModel.fill` against `score` of as many masked rows."""

from __future__ import annotations

import argparse

from benchmarks.common import begin_timing, medians, print_table
from hf_ebm.assets import load_embedded
from hf_ebm.models.energy.chains import proposal_support

TEXT = "and the {} said unto the {} of israel, behold"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, help="candidates of a blank; default: the whole vocabulary")
    arguments = begin_timing(parser, repeats=3)
    model, tokenizer = load_embedded()
    plain, blanks = TEXT.format("king", "men"), TEXT.format("[MASK]", "[MASK]")
    words = None
    if arguments.words is not None:
        some = proposal_support(model, None).nonzero()[: arguments.words, 0]
        words = tokenizer.convert_ids_to_tokens(some.tolist())
    out = model.fill(blanks, tokenizer, words=words)  # the run-time checks of the head are in neither time
    rows, scored = out.num_masked_rows, int(model.score([plain], tokenizer).num_tokens)
    texts = [plain] * (rows // scored)
    works = {
        "fill": lambda: model.fill(blanks, tokenizer, words=words),
        "score": lambda: model.score(texts, tokenizer),
    }
    found = medians(works, arguments.repeats)
    per_row = found["fill"] / rows, found["score"] / (len(texts) * scored)
    header = ["method", "fills", "masked rows", "fill, µs a row", "score, µs a row", "ratio"]
    print_table(
        header, [[out.method[0], (rows // 2) ** 2, rows, *(1e6 * own for own in per_row), per_row[0] / per_row[1]]]
    )


if __name__ == "__main__":
    main()
