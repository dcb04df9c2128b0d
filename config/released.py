# the first author's released code: the learner does not replay the mask, and what stands for the KL
# is one-sided, on sampled tokens of all responses
learner = "dense"
distill = 0.1
distill_by = "one_sided"
distill_on = "all"
