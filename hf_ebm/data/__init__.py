"""Data and what turns them into inputs and scores; import from the modules.

`bibles` and `cmudict_tasks` are data that can be had without a model hub: the King James Bible as clauses and as
verses, two Bibles as Spanish-English pairs of verses, stress and pronunciation of English words. `corpora` reads
corpora of one's own (CoNLL-2003, supertags, parallel text), `symbols` makes tokenizers for texts of symbols and encodes
pairs of them, `conditional` makes rows of source and target for masked language models, `synthetic` draws from
languages whose probabilities are known, `metrics` scores predicted sequences and counts how often a model prefers the
good one of two sentences.
"""

from hf_ebm.renamed import rename_modules

_MOVED = {
    "continuations": "data.conditional", "kjv": "data.bibles", "minimal_pairs": "data.metrics", "prompts": "texts",
    "verse_pairs": "data.bibles",
}  # fmt: skip
rename_modules(__name__, {old: f"hf_ebm.{new}" for old, new in _MOVED.items()})
