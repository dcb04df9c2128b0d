"""What goes in and how it is judged: tokenizer, problems and rewards, the embedded checkpoint."""
