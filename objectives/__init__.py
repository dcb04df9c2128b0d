"""Objectives that plug into the loop of train.py beside GRPO: PPO and online DPO."""
