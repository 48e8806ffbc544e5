"""The CPU implementations: same contract as the Triton kernels, one GEMM per expert that has rows."""
