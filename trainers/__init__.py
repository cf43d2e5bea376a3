"""Trainer subclasses with search-aware and energy objectives, imported as `hf_ebm.trainers`."""

if __name__ == "trainers":
    raise ImportError("import hf_ebm.trainers, not trainers: this folder is installed inside the hf_ebm package")
