"""What every notebook imports, imported once."""

import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets  # noqa: F401
import evaluate  # noqa: F401
import matplotlib
import torch
import transformers  # noqa: F401
from IPython.core import interactiveshell  # noqa: F401
from matplotlib import pyplot  # noqa: F401

import hf_ebm  # noqa: F401

torch.set_num_threads(1)
matplotlib.use("agg")
warnings.filterwarnings("error", message=".*the old name will go")
