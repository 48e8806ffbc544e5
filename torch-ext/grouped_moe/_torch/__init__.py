"""The CPU implementations: same contract as the Triton kernels, one GEMM per expert that has rows.

One rounding differs: in two-byte dtypes the activation starts from the stored, rounded pre-activation here, and from
the accumulator there.
"""
