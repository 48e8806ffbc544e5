"""The experts block of one Qwen3-30B-A3B layer, for `kernels benchmark`: decode, a long batch, sentinels, a step.

Every workload is verified against the package's fp32 reference. run.py measures next to peers.
"""

import functools

import torch
from kernels.benchmark import Benchmark

# A GPU runs the layer as it is. A CPU would take minutes for it, so there it is narrow: E, top_k, H, I, tokens.
LAYER, LAYER_CPU = (128, 8, 2048, 768, 4096), (16, 4, 128, 64, 256)


class ExpertsBenchmark(Benchmark):
    """bf16 throughout, random routing to distinct experts; in `sentinels` seven of eight slots are another rank's."""

    seed = 0

    def inputs(self, tokens: int = 0, local: float = 1.0) -> None:
        """Unit-scale inputs, weights divided by the root of their fan-in; the down-projection by eight times that.

        So results are an eighth of unit scale: the runner's tolerance of 1e-2 is above their largest bf16 rounding.
        tokens: as many as fill a GPU by default.
        """
        e, top_k, h, i, many = LAYER_CPU if self.device == "cpu" else LAYER
        tokens = tokens or many

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

        ids = torch.rand(tokens, int(e / local), device=self.device).topk(top_k).indices
        remote = ids >= e
        self.ids = ids.masked_fill(remote, e)
        weights = torch.rand(tokens, top_k, device=self.device) + 0.1
        weights = (weights / weights.sum(1, keepdim=True)).masked_fill(remote, 0.0).to(torch.bfloat16)
        up, down = randn(e, 2 * i, h) / h**0.5, randn(e, h, i) / (8 * i**0.5)
        self.x, self.dout = randn(tokens, h), randn(tokens, h)
        self.leaves = [self.x, weights, up, down]
        self.out = torch.empty_like(self.x)

    def result(self, function, leaves: list, dout: torch.Tensor) -> torch.Tensor:
        """The output of the package's function or the reference's; of a step, the gradient of the hidden states."""
        with torch.set_grad_enabled(leaves[0].requires_grad):
            x, *rest = leaves
            out = function(x, self.ids, *rest)
        return torch.autograd.grad(out, leaves, dout)[0] if out.requires_grad else out

    def call(self) -> None:
        """One call under no_grad or, where the leaves require gradients, a step with all gradients."""
        self.out = self.result(self.kernel.grouped_mm_experts, self.leaves, self.dout)

    def verify(self) -> torch.Tensor:
        """What the reference gives in fp32, after a relative check: the runner's own allows 1e-2 whatever the size.

        bf16 roundings of the activation, the row and the result come to some 2^-8 in norm; one lost contribution of a
        token would be 2^-2 of its row.
        """
        leaves = [leaf.detach().float().requires_grad_(leaf.requires_grad) for leaf in self.leaves]
        expected = self.result(self.kernel.reference.grouped_mm_experts, leaves, self.dout.float())
        self.out = self.out.float()
        error = ((self.out - expected).norm() / expected.norm()).item()
        if not error < 2**-6:
            raise RuntimeError(f"relative error {error:.2e} against the fp32 reference")
        return expected

    def setup_training(self) -> None:
        self.inputs()
        for leaf in self.leaves:
            leaf.requires_grad_()

    setup_decode = functools.partialmethod(inputs, tokens=1)
    setup_long_batch = inputs
    setup_sentinels = functools.partialmethod(inputs, local=1 / 8)
    benchmark_decode = benchmark_long_batch = benchmark_sentinels = benchmark_training = call
    verify_decode = verify_long_batch = verify_sentinels = verify_training = verify
