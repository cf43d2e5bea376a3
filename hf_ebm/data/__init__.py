"""Data that can be had without a model hub: the King James Bible as clauses."""
