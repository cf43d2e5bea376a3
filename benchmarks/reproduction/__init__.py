"""Tables and figures of the papers, run again: one module a chapter, over `laboratory` (training runs) and `report`."""
