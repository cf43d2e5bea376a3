"""The command `hf-ebm`: commands are functions, options are fields of dataclasses, records come in and go out.

- `main`: the entry point; `help`: which commands there are, and their stored help;
- `commands`: what a command is, and what all share;
- `sample`, `filling`, `scoring`, `continuations`, `demo`, `train`: the commands;
- `training`: what the objectives of `hf-ebm train` share;
- `tables`: records in files; `run_records`: those of long runs.
"""
