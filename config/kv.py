# one code at a time: answers of 4 tokens
task = "kv"
prompt_tokens = 192
max_new_tokens = 5
window = 16
budget = 41
