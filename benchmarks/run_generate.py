"""generate() of a Qwen3-MoE of 4 layers with the sizes of Qwen3-30B-A3B, next to transformers' default.

    python benchmarks/run_generate.py --output benchmarks/results/generate_h200.json [--smoke]

The default is grouped_mm for the prompt and batched_mm for decoding. A call is the prompt's forward and all new tokens.
"""

from typing import Dict, List, Optional, Sequence, Tuple

import torch
from machine import DEVICE, Task, load_kernel, main_of, make_parser
from problems import Problem, run_group
from providers import GROUPED, OURS
from timing import EAGER, Call
from workload import QWEN3_30B, SMOKE

NAMES = {OURS: "grouped_moe", GROUPED: "grouped_mm"}  # as experts_implementation
PROMPT = 32  # tokens
MAX_DIFFERENCE = 5e-2  # of the logits, in norm, relative


def make_model(smoke: bool) -> torch.nn.Module:
    """The model, with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    layer, heads = (SMOKE, (2, 1, 32, 512)) if smoke else (QWEN3_30B, (32, 4, 128, 151936))
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    config = Qwen3MoeConfig(
        **dict(zip(names, heads)), hidden_size=layer.hidden, num_hidden_layers=4,
        intermediate_size=3 * layer.hidden, moe_intermediate_size=layer.intermediate, num_experts=layer.experts,
        num_experts_per_tok=layer.top_k, norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def problem(model: torch.nn.Module, batch: int, static: bool, new_tokens: int) -> Problem:
    """static: with the static cache, for which transformers compiles the decoding steps."""
    prompt = torch.randint(1, model.config.vocab_size, (batch, PROMPT), device=DEVICE)
    options = {"cache_implementation": "static"} if static else {}

    def make(name: str) -> Call:
        def call(_: int) -> Sequence[torch.Tensor]:
            model.set_experts_implementation(NAMES[name])
            return model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
                min_new_tokens=new_tokens, max_new_tokens=new_tokens, **options,
            )  # fmt: skip

        return call

    calls = {name: make(name) for name in NAMES}

    def check(name: str) -> Tuple[Dict[str, float], bool]:
        """Logits of the prompt's first token, before routing can depend on rounding, next to the default's."""
        calls[name](0)
        logits = []
        for implementation in (NAMES[name], NAMES[GROUPED]):
            model.set_experts_implementation(implementation)
            with torch.no_grad():
                logits.append(model(prompt).logits[:, 0].float())
        error = ((logits[0] - logits[1]).norm() / logits[1].norm()).item()
        return {"logits": error}, error < MAX_DIFFERENCE

    name = f"generate batch={batch} {'static compiled' if static else 'eager'} cache"
    described = {"name": name, "batch": batch, "static": static, "new_tokens": new_tokens}
    return Problem(described, {"generate": calls}, check, {})


def main(argv: Optional[Sequence[str]] = None) -> dict:
    arguments = make_parser(__doc__, budget=300, seconds=6.0).parse_args(argv)
    kernel = load_kernel()
    kernel.register_experts_implementation(NAMES[OURS])
    model, cases = make_model(arguments.smoke), [(batch, static) for static in (False, True) for batch in (1, 8)]
    new_tokens = 6 if arguments.smoke else 48

    def measure(batch: int, static: bool) -> List[dict]:
        return run_group([problem(model, batch, static, new_tokens)], (EAGER,), arguments)

    tasks = [
        Task(f"generate batch={batch} static={static}", lambda batch=batch, static=static: measure(batch, static))
        for batch, static in (cases[:2] if arguments.smoke else cases)
    ]
    return main_of("generate", arguments, kernel, tasks)


if __name__ == "__main__":
    main()
