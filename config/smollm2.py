# SmolLM2-135M-Instruct finds one number in about 1,000 tokens of filler while the sampler keeps
# 1/17 of the prompt's keys
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
out_dir = "out-smollm2"
task = "needle"
prompt_tokens = 1088
prompts = 8
max_new_tokens = 24
budget = 64
window = 16
sinks = 4
norm = "token"
steps = 150
lr = 2e-5
eval_every = 25
eval_problems = 128
save_every = 50
