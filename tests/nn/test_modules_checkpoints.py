"""GroupedLinear: checkpoints of either form, copies, pickles and conversions."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from compare import assert_bitwise
from copies import COPIES
from layers import LAYOUTS, Form, N, by_layout, is_packed, make_batch, make_module, packed, run


@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
@by_layout
def test_checkpoints_of_every_form_load_into_every_form(grouped_moe, form, source, assign, nested):
    """And stay as they are."""
    saved, module = make_module(grouped_moe, source, "cpu"), make_module(grouped_moe, form, "cpu", delay_wgrad=True)
    want = {kind: packed(saved, kind) for kind in ("weight", "bias")}
    prefix, root = "", module
    if nested:
        saved = torch.nn.ModuleDict({"a": torch.nn.Sequential(saved), "b": torch.nn.Linear(2, 2)})
        root = torch.nn.ModuleDict({"a": torch.nn.Sequential(module), "b": torch.nn.Linear(2, 2)})
        prefix = "a.0."
    checkpoint = saved.state_dict()
    checkpoint[f"{prefix}_extra_state"] = torch.zeros(0, dtype=torch.uint8)
    keys, metadata = list(checkpoint), checkpoint._metadata
    assert root.load_state_dict(checkpoint, strict=True, assign=assign) == ([], [])
    problems = []  # Some callers give modules the whole checkpoint, one by one.
    module._load_from_state_dict(checkpoint, prefix, {}, True, problems, problems, problems)
    assert problems == [] and list(checkpoint) == keys and checkpoint._metadata is metadata
    for kind, tensor in want.items():
        assert_bitwise(kind, packed(module, kind), tensor)
    assert form.weight or is_packed(module)
    assert all(p.requires_grad and p.skip_backward_post_hook for p in module.parameters())


@by_layout
def test_wrong_checkpoints_are_refused(grouped_moe, form):
    """Also if they are of the other form: with too few groups or too many, with both forms, or of other shapes."""
    module = make_module(grouped_moe, form, "cpu")
    own = module.state_dict()
    other = make_module(grouped_moe, Form(not form.weight, form.bias, "scaled"), "cpu").state_dict()
    if form.weight:
        few = {name: tensor for name, tensor in other.items() if name != "weight2"}
        wrong = [few, {**other, "weight4": other["weight0"]}, {**other, "weight2": torch.ones(N)}]
    else:
        weight = other["weight"]
        several = weight[:3], torch.cat([weight, weight]), weight[:, 1:], torch.ones(())
        wrong = [{**other, "weight": each} for each in several]
    for checkpoint in (*wrong, {**own, **other}, {**own, "extra": torch.zeros(1)}):
        with pytest.raises(RuntimeError, match="for GroupedLinear"):
            module.load_state_dict(checkpoint)
    assert module.load_state_dict({}, strict=False).missing_keys == list(own)


def test_biases_that_a_module_has_not_are_named(grouped_moe):
    """By their own keys."""
    discrete = make_module(grouped_moe, Form(False, False), "cpu").state_dict()
    with pytest.raises(RuntimeError, match='Unexpected key.*"bias0", "bias1"'):
        make_module(grouped_moe, Form(kind="none"), "cpu").load_state_dict(discrete)


@by_layout
def test_a_hook_renames_keys_of_either_form(grouped_moe, form):
    source = make_module(grouped_moe, Form(not form.weight, not form.bias, "scaled"), "cpu")
    module, seen = make_module(grouped_moe, form, "cpu"), []

    def rename(_, state_dict, prefix, *args):
        seen.append(prefix)
        for key in [*state_dict]:
            if key.startswith(f"{prefix}old."):
                state_dict[prefix + key.removeprefix(f"{prefix}old.")] = state_dict.pop(key)

    module.register_load_state_dict_pre_hook(rename)
    given = {f"1.old.{name}": tensor for name, tensor in source.state_dict().items()}
    torch.nn.Sequential(torch.nn.Identity(), module).load_state_dict(dict(given))
    assert seen == ["1."]
    for kind in ("weight", "bias"):
        assert_bitwise(kind, packed(module, kind), packed(source, kind))


def test_extra_state_of_a_subclass(grouped_moe):
    class Counting(grouped_moe.GroupedLinear):
        count = 1

        def get_extra_state(self):
            return self.count

        def set_extra_state(self, state):
            self.count = state

    source, module = Counting(2, 8, 8), Counting(2, 8, 8)
    source.count = 7
    module.load_state_dict(source.state_dict())
    assert module.count == 7


@pytest.mark.parametrize("how", COPIES)
@by_layout
def test_copies(grouped_moe, form, how):
    module = make_module(grouped_moe, form, "cpu", delay_wgrad=True)
    batch = make_batch(form, "cpu")
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: pytest.fail("the hook of another module"))
    run(module, batch)
    next(module.parameters()).requires_grad_(False)
    for parameter in module.parameters():
        parameter.allreduce = False
    twin = COPIES[how](module)
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in module.named_parameters()]
    for (name, got), want in zip(twin.named_parameters(), module.parameters()):
        assert got.requires_grad == want.requires_grad and got.skip_backward_post_hook, name
        assert hasattr(got, "allreduce") == (how in ("pickle", "torch.save")), "as torch keeps attributes or not"
        assert got.data_ptr() != want.data_ptr(), name
        assert_bitwise(name, got.detach(), want.detach())
    assert form.weight or is_packed(twin)
    with pytest.raises(RuntimeError, match="nothing is stored"):
        twin.backward_dw()
    got = run(twin, batch)
    twin.backward_dw()
    assert_bitwise("y", got["y"], run(module, batch)["y"])
    assert module.discard_delayed_wgrad() == 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_compiled_module_have_their_own_weights(grouped_moe, how):
    """What `Module.compile` puts there runs the module that it was called on."""
    module, batch = make_module(grouped_moe, LAYOUTS[0], "cpu"), make_batch(LAYOUTS[0], "cpu")
    module.compile(backend="aot_eager")
    want = run(module, batch)["y"].clone()
    twin = COPIES[how](module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert_bitwise("y", run(twin, batch)["y"], want)


@pytest.mark.parametrize("shared", [False, True])
def test_pickle_writes_the_weights_once(grouped_moe, shared):
    modules = {form.weight: make_module(grouped_moe, form, "cpu") for form in (LAYOUTS[0], LAYOUTS[-1])}
    size = {single: len(pickle.dumps(m.share_memory() if shared else m)) for single, m in modules.items()}
    assert size[False] < 1.5 * size[True]


@pytest.mark.parametrize("how", [how for how in COPIES if how != "to_empty"])  # PyTorch itself unties there
def test_copies_of_groups_that_share_a_weight(grouped_moe, how):
    module = make_module(grouped_moe, Form(False, True), "cpu")
    module.weight2 = module.weight0
    twin, batch = COPIES[how](module), make_batch(Form(False, True), "cpu")
    assert twin.weight2 is twin.weight0 and twin.weight1 is not twin.weight0
    assert_bitwise("y", run(twin, batch)["y"], run(module, batch)["y"])


@by_layout
def test_processes_share_parameters(grouped_moe, form):
    """What is handed to another process after `share_memory()` is trained there for this one, too."""
    module = make_module(grouped_moe, form, "cpu").share_memory()
    alone, twin = pickle.loads(pickle.dumps(module)), pickle.loads(bytes(ForkingPickler.dumps(module)))
    assert form.weight or (is_packed(alone) and is_packed(twin))
    want = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    for (name, parameter), single, before in zip(module.named_parameters(), alone.parameters(), want):
        assert_bitwise(name, parameter.detach(), before + 1.0)
        assert_bitwise(name, single.detach(), before)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_shallow_copy_shares_parameters(grouped_moe, layout):
    module = make_module(grouped_moe, layout, "cpu")
    twin = copy.copy(module)
    assert list(map(id, twin.parameters())) == list(map(id, module.parameters()))
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert not next(twin.parameters()).any() and twin._delayed is not module._delayed


def test_deepcopy_keeps_ties(grouped_moe):
    """As pickle does of a weight of all groups."""
    module, single = (make_module(grouped_moe, form, "cpu") for form in (LAYOUTS[-1], LAYOUTS[0]))
    twin, tied = copy.deepcopy((module, [module.weight2]))
    assert tied[0] is twin.weight2 and is_packed(twin)
    twin, tied = pickle.loads(pickle.dumps((single, [single.weight])))
    assert tied[0] is twin.weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_conversions_keep_identity_and_storage(grouped_moe, dtype):
    module = make_module(grouped_moe, LAYOUTS[-1], "cpu")
    parameters = list(module.parameters())
    assert module.to(dtype) is module
    assert all(a is b for a, b in zip(module.parameters(), parameters))
    assert is_packed(module) and module.weight3.dtype == dtype
