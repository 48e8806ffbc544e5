"""The experts block of one Qwen3-30B-A3B layer, for `kernels benchmark`: decode, a long batch, sentinels, a step.

Every workload is verified against the package's fp32 reference. run.py measures next to peers.
"""

import torch
from kernels.benchmark import Benchmark

# A GPU runs the layer as it is. A CPU would take minutes for it, so there it is narrow.
LAYER = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}
LAYER_CPU = {"experts": 16, "top_k": 4, "hidden": 128, "intermediate": 64}
LONG_BATCH, LONG_BATCH_CPU = 4096, 256


class ExpertsBenchmark(Benchmark):
    """bf16 throughout, random routing to distinct experts; in `sentinels` seven of eight slots are another rank's."""

    seed = 0

    def inputs(self, tokens: int, local: float = 1.0) -> None:
        """Unit-scale inputs, weights divided by the root of their fan-in; the down-projection by eight times that.

        So results are an eighth of unit scale: the runner's tolerance of 1e-2 is above their largest bf16 rounding.
        """
        layer = LAYER_CPU if self.device == "cpu" else LAYER
        e, h, i = layer["experts"], layer["hidden"], layer["intermediate"]
        randn = self.randn
        self.x = randn(tokens, h)
        ids = torch.rand(tokens, int(e / local), device=self.device).topk(layer["top_k"]).indices
        remote = ids >= e
        self.ids = ids.masked_fill(remote, e)
        weights = torch.rand(tokens, layer["top_k"], device=self.device) + 0.1
        weights = (weights / weights.sum(1, keepdim=True)).masked_fill(remote, 0.0)
        self.weights = weights.to(torch.bfloat16)
        self.up, self.down = randn(e, 2 * i, h) / h**0.5, randn(e, h, i) / (8 * i**0.5)
        self.dout = randn(tokens, h)
        self.out = torch.empty_like(self.x)

    def randn(self, *shape: int) -> torch.Tensor:
        """Normal bf16 numbers on the device."""
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def long_batch(self) -> int:
        """Tokens of the workloads that are to fill a GPU."""
        return LONG_BATCH_CPU if self.device == "cpu" else LONG_BATCH

    def forward(self) -> None:
        """One call under no_grad."""
        with torch.no_grad():
            self.out = self.kernel.grouped_mm_experts(self.x, self.ids, self.weights, self.up, self.down)

    def reference(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The experts block by the package's reference in fp32; inputs default to this workload's."""
        x, weights, up, down = inputs or (t.float() for t in (self.x, self.weights, self.up, self.down))
        return self.kernel.reference.grouped_mm_experts(x, self.ids, weights, up, down)

    def verify_forward(self) -> torch.Tensor:
        """The reference's output, after a check that does not loosen with the size of the numbers."""
        with torch.no_grad():
            return self.checked(self.reference())

    def checked(self, expected: torch.Tensor) -> torch.Tensor:
        """expected, after a relative check: the runner's own allows 1e-2 whatever the size of the numbers.

        bf16 roundings of the activation, the row and the result come to some 2^-8 in norm; one lost contribution of a
        token would be 2^-2 of its row.
        """
        self.out = self.out.float()
        error = ((self.out - expected).norm() / expected.norm()).item()
        if not error < 2**-6:
            raise RuntimeError(f"relative error {error:.2e} against the fp32 reference")
        return expected

    def setup_decode(self) -> None:
        self.inputs(1)

    def setup_long_batch(self) -> None:
        self.inputs(self.long_batch())

    def setup_sentinels(self) -> None:
        self.inputs(self.long_batch(), local=1 / 8)

    def setup_training(self) -> None:
        self.inputs(self.long_batch())
        for tensor in (self.x, self.weights, self.up, self.down):
            tensor.requires_grad_()

    benchmark_decode = benchmark_long_batch = benchmark_sentinels = forward
    verify_decode = verify_long_batch = verify_sentinels = verify_forward

    def benchmark_training(self) -> None:
        """Forward and backward, all gradients; out is the gradient of the hidden states."""
        inputs = (self.x, self.weights, self.up, self.down)
        out = self.kernel.grouped_mm_experts(self.x, self.ids, *inputs[1:])
        self.out = torch.autograd.grad(out, inputs, self.dout)[0]

    def verify_training(self) -> torch.Tensor:
        inputs = [t.detach().float().requires_grad_() for t in (self.x, self.weights, self.up, self.down)]
        expected = torch.autograd.grad(self.reference(*inputs), inputs, self.dout.float())[0]
        return self.checked(expected)
