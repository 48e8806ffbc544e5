"""Products with block-scaled weights, for any GPU: 8-bit codes times rows of two bytes or four."""
