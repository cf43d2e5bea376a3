"""Speed side by side with named baselines in one run, printed as ratio tables.

python -m benchmarks.scoring     # against minicons (pip install -e '.[benchmarks]')
python -m benchmarks.filling     # exact joint fills against scoring as many rows
python -m benchmarks.variants    # variants of a protein against a loop, and against scoring whole sequences
python -m benchmarks.pair_joints # joints of two positions: divergences, and what they are worth as proposals
python -m benchmarks.sampling    # against plain and careful Metropolis–Hastings loops
python -m benchmarks.mixing      # effective samples and errors of samplers at equal budgets, kept in a file
python -m benchmarks.gpu         # what a CUDA card does, in under four minutes
"""
