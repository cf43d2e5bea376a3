"""Speed side by side with named baselines in one run, printed as ratio tables.

python -m benchmarks.scoring     # against minicons (pip install -e '.[benchmarks]')
python -m benchmarks.filling     # exact joint fills against scoring as many rows
python -m benchmarks.sampling    # against plain and careful Metropolis–Hastings loops
python -m benchmarks.gpu         # what a CUDA card does, in under four minutes
"""
