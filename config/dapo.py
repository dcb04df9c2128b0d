# DAPO's reduction and clip (2503.14476); the clip acts from the second update on a rollout on:
# add --updates=2 and a lower lr
norm = "token"
clip_high = 0.28
