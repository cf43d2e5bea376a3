"""Templates of model cards, one per kind of model, installed as `hf_ebm.hub_cards`."""
