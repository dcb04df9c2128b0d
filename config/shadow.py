# the logged mask is replayed, but the two policies are not tied together
distill = 0.0
