# online DPO: the best response of each group against the worst
objective = "dpo"
