# the evicting sampler's tokens weigh min(w, 2), w = dense learner / sampler: truncated importance
# sampling
learner = "dense"
distill = 0.0
correction = "tis"
