# the evicting sampler's tokens weigh w, and nothing outside [0.5, 2]: masked importance sampling
learner = "dense"
distill = 0.0
correction = "mis"
