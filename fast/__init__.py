"""What only makes it faster: kernels that replace formulas of the files above, and what keeps memory low."""
