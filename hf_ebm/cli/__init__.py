"""The command `hf-ebm`: commands are functions, options are fields of dataclasses, records come in and go out."""
