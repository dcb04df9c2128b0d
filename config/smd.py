# the default, said explicitly: the logged mask is replayed, and on rewarded responses the dense
# policy learns from the sparse one
learner = "shadow"
distill = 0.1
distill_to = "dense"
distill_on = "reward"
