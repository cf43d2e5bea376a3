"""Transformers models of the project, one folder each: configuration_*.py and modeling_*.py, as in Transformers."""
