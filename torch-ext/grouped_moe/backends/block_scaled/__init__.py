"""Products with block-scaled weights in Triton: of rows of two bytes or four on any GPU, of 8-bit rows from sm89 on."""
