"""Programs that measure and draw: python -m experiments.ablate, variance, bench, draw, generate."""
