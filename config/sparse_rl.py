# weights of Sparse-RL (2601.10079): truncated, normalised over the batch, whole responses rejected
learner = "dense"
distill = 0.0
correction = "sparse_rl"
