"""peft's LoRA on the weights of experts: what it computes with eager experts, and no weight is merged for it."""

import copy
import json
import warnings
from functools import partial

import peft_experts
import pytest
import tokenizers
import torch
import transformers
from compare import tolerances
from marks import by_fp32_and_bf16
from models import assert_close, errors, generate
from packaging.version import Version
from peft_experts import BOTH, by_kind, by_model, make_adapted, outputs, peft, run, train_step
from torch import nn

pytest_plugins = ["peft_experts"]
pytestmark = pytest.mark.usefixtures("fresh_peft")


@pytest.mark.parametrize("way", ["plain", "reentrant-checkpoint", "checkpoint", "compiled"])
@by_model
def test_models_match_eager(name, way, implementation, calls, device):
    """Logits, loss, gradients of the factors and of routers; no weight is merged."""
    model, ids = peft_experts.make_peft_model(name, device)
    if way == "compiled" and name == "nemotron_h":
        pytest.skip("transformers does not compile it whole")
    model.train(way.endswith("checkpoint"))
    want = train_step(model, ids, "eager")
    assert sum("experts.lora_" in key for key in want) == 4
    assert sum(key.endswith(peft_experts.ROUTERS) for key in want) == 2
    if way.endswith("checkpoint"):
        options = {"use_reentrant": way.startswith("reentrant")}
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    elif way == "compiled":
        model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.utils.parametrize, "register_parametrization", None)
        assert_close(train_step(model, ids, implementation), want)
    assert way == "compiled" or calls == [BOTH] * len(calls) != []


def test_compiles_checkpoints_with_dynamic_numbers(implementation, device):
    """Each layer has a scaling and bounds for it, of which a graph with dynamic=True makes no variables."""
    model, ids = peft_experts.make_peft_model("qwen3_moe", device)
    model.train()
    want = train_step(model, ids, "eager")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.forward = torch.compile(model.forward, dynamic=True, backend="aot_eager")
    assert_close(train_step(model, ids, implementation), want)


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
@by_kind
def test_experts_match_eager(kind, late, implementation, calls, device):
    """Also where the grouped building blocks run.

    late: registered after peft has wrapped the model, whose sums in the place of weights are taken apart again.
    """
    model, inputs = make_adapted(kind, device)
    if late:
        peft_experts.forget_registration(model)
    assert len(run(model, inputs, "eager")) == 7
    peft_experts.assert_runs_as_eager(model, inputs, implementation)
    assert calls == [BOTH]


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@by_kind
def test_low_precision(kind, autocast, implementation, device):
    """Errors against fp64, over several draws: where all is in bf16, the block's are no larger than those of eager.

    A fifth is room for the scatter, and for the CPU, which rounds a product before it adds the pair's. Under autocast
    peft merges in fp32 and rounds the sum once, where the package rounds weights and factors.
    """
    dtype = torch.float32 if autocast else torch.bfloat16
    (model, _), draws = make_adapted(kind, device, dtype=dtype), 8
    assert all(p.dtype == torch.float32 for key, p in model.named_parameters() if "lora_" in key)
    wide, ours, theirs = copy.deepcopy(model).double(), {}, {}
    for _ in range(draws):
        inputs = peft_experts.make_inputs(device, dtype=dtype)
        want = run(wide, tuple(t.double() if t.is_floating_point() else t for t in inputs), "eager")
        for found, each in ((ours, implementation), (theirs, "eager")):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                for key, error in errors(run(model, inputs, each), want).items():
                    found[key] = found.get(key, 0.0) + error / draws
    for key, error in ours.items():
        assert error <= tolerances(torch.bfloat16)[0], (key, error, theirs[key])
        if not autocast and kind in peft_experts.MODELS:
            assert error <= 1.2 * theirs[key], (key, error, theirs[key])


@by_kind
def test_sentinels(kind, implementation, device):
    """As expert parallelism makes them: like slots of weight 0, but that their weights are not read."""
    model, (x, ids, weights, cotangent) = make_adapted(kind, device)
    sentinel = torch.rand(ids.shape, device=device) < 0.5
    want = run(model, (x, ids, weights.masked_fill(sentinel, 0.0), cotangent), "eager")
    want["top_k_weights"].masked_fill_(sentinel, 0.0)
    weights = weights.masked_fill(sentinel, float("nan"))
    got = run(model, (x, ids.masked_fill(sentinel, peft_experts.E), weights, cotangent), implementation)
    assert_close(got, want)
    again = run(model, (x, ids.masked_fill(sentinel, -3), weights, cotangent), implementation)
    assert all(torch.equal(got[key], again[key]) for key in got)


def largest_allocation(step, tmp_path) -> int:
    """Bytes of the largest block that the allocator was asked for, by the profiler's record."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return max(event["args"]["Bytes"] for event in events if event["name"] == "[memory]")


@by_fp32_and_bf16
@by_kind
def test_no_merged_weight_is_made(kind, dtype, implementation, device, tmp_path):
    """Nothing of E N K elements is allocated, forward or backward, peft's registration included."""
    many = 64
    model, inputs = make_adapted(kind, device, num_experts=many, dtype=dtype)
    run(model, inputs, implementation)
    merged = many * peft_experts.H * peft_experts.I * dtype.itemsize
    assert largest_allocation(lambda: run(model, inputs, implementation), tmp_path) < merged
    assert largest_allocation(lambda: run(model, inputs, "eager"), tmp_path) >= merged


@pytest.mark.parametrize("built", ["with values", "without values"])
def test_the_first_call_may_be_of_a_transform(built, module, implementation, calls, device):
    """Of many adapters at once; or of a model without values, which tells nothing of peft."""
    from accelerate import init_empty_weights

    model, inputs = make_adapted("qwen3_moe", device)
    inputs = inputs[:3]
    peft_experts.set_implementation(model, implementation)
    module("integrations.peft")._computes_our_sum.cache_clear()
    if built == "without values":
        with init_empty_weights():
            assert not module("integrations.peft")._is_known(False)
    factors = {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}
    each = {name: torch.stack((factor, 0.5 * factor)) for name, factor in factors.items()}
    call = partial(torch.func.functional_call, model)
    got = torch.func.vmap(lambda given: call(given, inputs))(each)
    for index, out in enumerate(got):
        peft_experts.assert_near(out, call({name: stacked[index] for name, stacked in each.items()}, inputs))
    assert calls == [BOTH] * 3


@pytest.mark.parametrize("way", ["compiled", "inference", "autocast", "bf16"])
@by_model
def test_the_first_call_finds_out_about_peft(name, way, module, implementation, calls, device):
    """Whatever modes it is in."""
    model, inputs = make_adapted(name, device)
    want, random = outputs(model, inputs, "eager"), torch.get_rng_state()
    module("integrations.peft")._computes_our_sum.cache_clear()
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if way == "compiled" else model
    torch.set_default_dtype(torch.bfloat16 if way == "bf16" else torch.float32)
    try:
        with torch.inference_mode(way == "inference"), torch.autocast(device, enabled=way == "autocast"):
            got = outputs(forward, inputs, implementation)
    finally:
        torch.set_default_dtype(torch.float32)
    if way != "autocast":
        peft_experts.assert_near(got, want)
    assert torch.equal(torch.get_rng_state(), random)
    assert module("integrations.peft")._is_known(name == "gpt_oss") and (way == "compiled" or calls == [BOTH])


@by_kind
def test_exports_factors(kind, implementation, calls, device):
    """In torch.export's default way, which traces by tensors without values, and without a warning."""
    model, inputs = make_adapted(kind, device)
    want = outputs(model, inputs, "eager")
    peft_experts.set_implementation(model, implementation)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="grouped_moe")
        program = torch.export.export(model, inputs[:3], strict=False)
    assert calls == [BOTH]
    peft_experts.assert_near(program.module()(*inputs[:3]).detach(), want)


def test_adapters_by_transformers(implementation, calls, device):
    """`model.add_adapter`, without a model of peft, of which some versions of transformers ask for a newer one."""
    needed = getattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0")
    if Version(peft.__version__) < Version(needed):
        pytest.skip(f"transformers {transformers.__version__} needs peft {needed}, which is {peft.__version__}")
    model, ids = peft_experts.make_model("qwen3_moe", device)
    options = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": []}
    model.add_adapter(peft.LoraConfig(r=peft_experts.RANK, init_lora_weights=False, **options))
    assert_close(train_step(model, ids, implementation), train_step(model, ids, "eager"))
    assert calls == [BOTH] * 2


@by_model
def test_generates_the_tokens_of_eager(name, implementation, calls, device):
    model, ids = peft_experts.make_peft_model(name, device)
    assert generate(model, ids, implementation) == generate(model, ids, "eager")
    assert calls and set(calls) == {BOTH}


@pytest.fixture(params=["transformers", "trl"])
def make_trainer(request, tmp_path, monkeypatch):
    """A function of a model and token ids (N, length)."""
    # Of several GPUs a Trainer in one process makes DataParallel, whose replicas peft's adapters do not run on.
    num_gpus = int(torch.cuda.is_available())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)

    def with_transformers(model, ids):
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(**options, remove_unused_columns=False)
        return Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])

    def with_trl(model, ids):
        trl, datasets, pyarrow = map(pytest.importorskip, ("trl", "datasets", "pyarrow"))
        # With a name of its own: what datasets makes one of, pyarrow 24 and later do not let it pickle.
        rows = datasets.Dataset(pyarrow.table({"input_ids": ids.tolist()}), fingerprint="rows")
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
        arguments = trl.SFTConfig(**options, max_length=None, bf16=False)
        return trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)

    options = {"output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
               "logging_steps": 1, "report_to": [], "save_strategy": "no", "seed": 0,
               "gradient_checkpointing": True}  # fmt: skip
    if not torch.cuda.is_available():
        options["use_cpu"] = True
    return {"transformers": with_transformers, "trl": with_trl}[request.param]


def test_trains_as_eager(implementation, calls, device, make_trainer):
    ids, losses = torch.randint(1, 64, (2, 12)), []
    for each in ("eager", implementation):
        torch.manual_seed(1)
        model, _ = peft_experts.make_peft_model("qwen3_moe", device)
        peft_experts.set_implementation(model, each)
        trainer = make_trainer(model, ids)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-4, atol=0)
    assert calls and set(calls) == {BOTH}
