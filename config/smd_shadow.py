# the other direction: the sparse policy is pulled towards the dense one
learner = "shadow"
distill = 0.1
distill_to = "shadow"
