# the other direction: on rewarded responses the sparse policy learns from the dense one
learner = "shadow"
distill = 0.1
distill_to = "shadow"
distill_on = "reward"
