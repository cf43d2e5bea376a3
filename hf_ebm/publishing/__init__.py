"""Publishing on the Hub: model cards of what was run, the models' code for those who don't have `hf_ebm`, uploads.

- `cards`: fills the templates of `hub_cards`, with the papers behind models and trainers.
- `remote_code`: the modules a model needs, flattened, and the `auto_map` that leads to them.
- `hub`: `push_to_hub` of models and trainers.
"""
