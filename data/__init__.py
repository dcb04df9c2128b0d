"""What goes in and how it is judged: tokenizer, problems and rewards, and the embedded checkpoint with the script that makes it."""
