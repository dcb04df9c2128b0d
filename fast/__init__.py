"""What only makes it faster: kernels that replace formulas, and what keeps memory low."""
