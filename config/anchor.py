# the dense policy is held where it was before training, instead of learning from the sparse one
learner = "shadow"
distill = 0.1
distill_to = "dense"
distill_on = "all"
teacher = "initial"
