# four codes at once: answers of 16 tokens
task = "kv4"
prompt_tokens = 256
max_new_tokens = 17
window = 20
budget = 60
