"""Data and what turns them into inputs and scores; import from the modules.

`kjv`, `verse_pairs` and `cmudict_tasks` are data that can be had without a model hub: the King James Bible as clauses
and as verses, two Bibles as Spanish-English pairs of verses, stress and pronunciation of English words. `corpora` reads
corpora of one's own (CoNLL-2003, supertags, parallel text), `symbols` makes tokenizers for texts of symbols and encodes
pairs of them, `conditional` makes rows of source and target for masked language models, `synthetic` draws from
languages whose probabilities are known, `minimal_pairs` counts how often a model prefers the good one of two sentences,
`metrics` scores predicted sequences.
"""

from hf_ebm.renamed import rename_modules

rename_modules(__name__, {"continuations": f"{__name__}.conditional", "prompts": "hf_ebm.texts"})
