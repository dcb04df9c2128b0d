# PPO with a full cache, to compare
objective = "ppo"
evict = "none"
learner = "dense"
distill = 0.0
