# SmolLM2-135M-Instruct looks up six codes in a list of about 85, in prompts of 1,150 tokens, while
# the sampler keeps 256 of each prompt's keys. One number in as much filler, while it keeps 64:
# --task=needle --budget=64 --window=16 --max_new_tokens=24 --lr=2e-5
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
out_dir = "out-smollm2"
task = "list"
prompt_tokens = 1152
prompts = 8
max_new_tokens = 80
budget = 256
window = 32
sinks = 4
norm = "token"
checkpointing = True  # for cards of 8 GB; without it a step takes 12 GB and 6 % less time
steps = 200
lr = 4e-5
eval_every = 25
eval_problems = 128
eval_final = 256
save_every = 50
