"""Tables and figures of the papers, run again: a module a chapter, over `experiment_cache` (runs) and `report`."""
