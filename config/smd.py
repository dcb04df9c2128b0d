# the default, said explicitly: the logged mask is replayed, and the dense policy learns from the
# sparse one
learner = "shadow"
distill = 0.1
distill_to = "dense"
