# sixteen codes at once: answers of 64 tokens
task = "kv16"
prompt_tokens = 704
max_new_tokens = 65
window = 44
budget = 300
