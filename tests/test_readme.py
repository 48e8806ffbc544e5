"""The README's examples run, and say what is so."""

import re

import torch
from conftest import ROOT


def test_examples_run(grouped_moe):
    """The blocks after the first, which loads a model from the Hub, in order and in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert "from_pretrained" in blocks[0] and len(blocks) == 5
    namespace = {"grouped_moe": grouped_moe}
    for block in blocks[1:]:
        exec(block, namespace)
    torch.testing.assert_close(namespace["same"], namespace["out"])
    assert namespace["hidden_states"].grad is not None
    assert not namespace["y"][38:].any() and not namespace["x"].grad[38:].any() and namespace["y"][:38].any()
    layer, probs = namespace["layer"], namespace["probs"]
    assert layer.weight.grad is None and layer.weight.main_grad[2].any() and not layer.weight.main_grad[1].any()
    assert layer.bias.grad.shape == layer.bias.shape and probs.grad.shape == probs.shape
