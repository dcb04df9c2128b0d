# Qwen2.5-Coder-0.5B-Instruct works out grade-school problems (GSM8K) in up to 256 tokens while the
# sampler drops keys of what it wrote; prompts are kept whole (budget). train.jsonl is that of
# github.com/openai/grade-school-math. The rate suits dense, shadow and smd, naive needs 1e-6
model = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
out_dir = "out-gsm8k"
task = "gsm8k/train.jsonl"
prompt_tokens = 320
prompts = 8
max_new_tokens = 256
evict = "rkv"
eval_evict = "rkv"
budget = 1024
response_budget = 48
period = 32
window = 8
norm = "token"
steps = 80
lr = 3e-6
eval_every = 20
eval_problems = 128
eval_final = 512
eval_batch = 512
save_every = 40
