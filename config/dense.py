# nothing is evicted: what a full cache would learn
evict = "none"
learner = "dense"
distill = 0.0
