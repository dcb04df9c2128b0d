# online DPO with a full cache, to compare
objective = "dpo"
evict = "none"
learner = "dense"
distill = 0.0
