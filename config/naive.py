# the evicting sampler is taken for the dense policy: the bias that the Shadow Mask removes
learner = "dense"
distill = 0.0
