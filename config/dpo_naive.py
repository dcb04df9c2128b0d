# online DPO that evicts and learns as if not, to compare
objective = "dpo"
learner = "dense"
distill = 0.0
