"""Training objectives as pure functions on tensors; import from the modules.

`losses` of tokens, candidates and energies, with estimates of log Z; `group_policy`, of groups of samples; `ranking`,
of candidates in order; `bayes_risk`, the choice of one of them; `mgs`, a search of parameters; `costs` says what a cost
is, `sequence_costs` are those with names; `rewards`, larger is better, are called by keywords and added up;
`completions` are prompts and what follows them as rows.
"""

from hf_ebm.renamed import rename_modules

rename_modules(
    __name__,
    {
        "cost_columns": f"{__name__}.costs",
        "decomposable_costs": f"{__name__}.costs",
        "enumerated": "hf_ebm.exact",
        "noise_contrastive": f"{__name__}.losses",
        "partition_function": f"{__name__}.losses",
        "parameter_search": f"{__name__}.mgs",
        "schedules": "hf_ebm.relaxations.soft_choices",
        "scorer_cost": "hf_ebm.trainers.costs",
        "sequence_risk": f"{__name__}.losses",
        "token_losses": f"{__name__}.losses",
    },
)
