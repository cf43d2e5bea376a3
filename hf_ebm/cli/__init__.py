"""The command `hf-ebm`: one module a command, arguments from dataclasses, records in and out."""
