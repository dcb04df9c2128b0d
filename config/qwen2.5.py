# Qwen2.5-0.5B-Instruct chains two facts in about 1,000 tokens of filler while the sampler keeps
# 1/17 of the prompt's keys
model = "Qwen/Qwen2.5-0.5B-Instruct"
out_dir = "out-qwen2.5"
task = "own"
prompt_tokens = 1088
prompts = 8
max_new_tokens = 24
budget = 64
window = 16
sinks = 4
norm = "token"
steps = 100
lr = 1e-5
eval_every = 25
eval_problems = 128
save_every = 50
