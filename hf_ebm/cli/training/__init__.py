"""What `hf-ebm train` is made of: data, models, scores and runs; energies and residual models."""
