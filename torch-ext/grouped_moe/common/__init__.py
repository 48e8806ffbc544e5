"""What every op of the package shares; nothing here imports Triton."""
