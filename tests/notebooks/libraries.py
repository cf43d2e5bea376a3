"""What notebooks import, imported once."""

import gc
import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import arviz  # noqa: F401
import datasets  # noqa: F401
import evaluate  # noqa: F401
import matplotlib
import torch
import transformers  # noqa: F401
from IPython.core import interactiveshell  # noqa: F401
from matplotlib import pyplot  # noqa: F401

from hf_ebm import EnergyModel, ResidualEnergyModel, assets, trainers  # noqa: F401

torch.set_num_threads(1)
matplotlib.use("agg")
warnings.filterwarnings("error", message=".*the old name will go")
gc.freeze()  # every training begins with a collection, which what is imported makes a long one
