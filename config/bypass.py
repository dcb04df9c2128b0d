# the clipped ratio is taken against the evicting sampler: what many frameworks' bypass mode does
learner = "dense"
distill = 0.0
ratio_to = "sampler"
