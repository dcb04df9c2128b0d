# a learned value of each prefix in place of the group's mean
objective = "ppo"
