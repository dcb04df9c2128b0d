# smd with the first author's released estimator in place of the KL: one-sided, on sampled tokens
learner = "shadow"
distill = 0.1
distill_by = "one_sided"
distill_on = "reward"
