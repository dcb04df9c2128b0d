# PPO that evicts and learns as if not, to compare
objective = "ppo"
learner = "dense"
distill = 0.0
