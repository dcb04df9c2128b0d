"""What surrounds the loop of train.py: checks and set-up, evaluation, reports, the dry run."""
