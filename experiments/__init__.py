"""Programs that measure and draw: python -m experiments.ablate, plot, variance, bench, draw,
generate."""
