# Dr. GRPO (2503.20783): no division by the standard deviation or by lengths
norm = "constant"
