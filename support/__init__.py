"""What is not about the method: settings, fp32 masters, the files of a run."""
