"""apply_plan on a model that lives longer than a message, loaded in any order, under any optimizer."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn

from tepal.client_app import apply_plan
from tepal.exchange import MODEL, Outgoing, Plan, Sender, partial_exchange
from tepal.models.blocks import canonical_state, find_blocks
from tepal.models.tiny_vit import TinyViT
from tepal.strategies.in_process import InProcessGrid
from tepal.training.freezing import frozen_rows


def model(seed=0, fused=True):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyViT((1, 8, 8), 10, width=16, depth=1, heads=2, fused=fused)


@pytest.fixture
def message_for():
    """A message as an app gets it: `values` of a model, of which `frozen` must not change."""
    InProcessGrid([])  # sets the identity that a Message needs

    def make(values, frozen):
        blocks = find_blocks(values)
        sender = Sender(blocks.layout, {"all": blocks.layout.names}, experiment="e", record="arrays")
        entries = {name: tensor.numpy().copy() for name, tensor in canonical_state(values).items()}
        trains = tuple(name for name in blocks.layout.names if name not in frozen)
        plan = Plan(client="c", round=1, needs={MODEL: blocks.layout.names}, trains=trains, returns={MODEL: trains})
        seen = []

        def app(msg, context):
            seen.append(msg)
            return Message(RecordDict({"arrays": msg.content["arrays"]}), reply_to=msg)

        sent = Message(sender.content(Outgoing(plan, lambda tree: entries))[0], 1, "train")
        partial_exchange(sent, Context(1, 1, {}, RecordDict(), {}), app)
        return seen[0]

    return make


def step(net, optimizer):
    optimizer.zero_grad()
    images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    net(images).square().sum().backward()
    optimizer.step()


def rows_of(net, which):
    return {name: tensor.clone() for name, tensor in canonical_state(net).items() if name in which}


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("load_first", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_frozen_entries_stay_under_any_optimizer_in_any_order(message_for, kind, load_first, fused):
    net, sent = model(seed=1, fused=fused), model(seed=2, fused=fused)
    frozen = find_blocks(sent).query_key
    msg = message_for(sent, frozen)
    if load_first:
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    apply_plan(net, msg)
    if not load_first:
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = OPTIMIZERS[kind](net.parameters())
    for _ in range(3):
        step(net, optimizer)
    kept, received = rows_of(net, frozen), rows_of(sent, frozen)
    for name in frozen:
        assert kept[name].numpy().tobytes() == received[name].numpy().tobytes()
    for name, tensor in rows_of(net, find_blocks(sent).value).items():
        assert not torch.equal(tensor, canonical_state(sent)[name]), name


def test_a_later_plan_unfreezes_what_an_earlier_one_froze(message_for):
    net = model()
    net.head.bias.requires_grad_(False)  # the app's own choice, not a plan's
    frozen = (*find_blocks(net).query_key, "head.weight")
    apply_plan(net, message_for(net, frozen))
    assert not net.head.weight.requires_grad and frozen_rows(net.blocks[0].attention.qkv.weight)
    apply_plan(net, message_for(net, ()))
    assert net.head.weight.requires_grad and not frozen_rows(net.blocks[0].attention.qkv.weight)
    assert not net.head.bias.requires_grad
    before = rows_of(net, find_blocks(net).query_key)
    step(net, torch.optim.SGD(net.parameters(), 0.1))
    assert not torch.equal(before["blocks.0.attention.qkv.weight:q"],
                           canonical_state(net)["blocks.0.attention.qkv.weight:q"])  # fmt: skip


def test_gradients_of_frozen_rows_are_zero_before_any_clipping(message_for):
    net = model()
    apply_plan(net, message_for(net, find_blocks(net).query_key))
    net(torch.rand(8, 1, 8, 8)).square().sum().backward()
    gradient = net.blocks[0].attention.qkv.weight.grad
    assert not gradient[:32].any() and gradient[32:].any()


def test_another_optimizers_steps_are_none_of_its_business(message_for):
    net, other = model(), nn.Linear(2, 2)
    apply_plan(net, message_for(net, find_blocks(net).query_key))
    before = other.weight.clone()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(other.weight, before - 0.1)


def test_buffers_are_not_taken_for_parameters(message_for):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 2))
    msg = message_for(net, ("1.running_mean", "1.num_batches_tracked", "0.weight"))
    apply_plan(net, msg)
    assert not net[0].weight.requires_grad and net[1].weight.requires_grad


class Normed(nn.Module):
    """Two stages, each a layer with running statistics, and a head."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(1 if n == 0 else 4, 4, 3, padding=1), norm(4, track_running_stats=True), nn.ReLU())
            for n in range(2)
        )
        self.head = nn.Linear(4 * 64, 2)

    def forward(self, images):
        return self.head(self.stages[1](self.stages[0](images)).flatten(1))


def entries_below(net, path):
    return tuple(name for name in find_blocks(net).layout.names if name.startswith(path))


def bits(net, path):
    return {name: tensor.numpy().tobytes() for name, tensor in net.state_dict().items() if name.startswith(path)}


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_a_frozen_layers_running_statistics_stay_while_those_above_it_move(message_for, norm):
    net = Normed(norm)
    apply_plan(net, message_for(net, entries_below(net, "stages.0.")))
    frozen, trained = bits(net, "stages.0."), bits(net, "stages.1.1.running")
    optimizer = OPTIMIZERS["AdamW"](net.parameters())
    for _ in range(3):
        net.train()
        step(net, optimizer)
    assert bits(net, "stages.0.") == frozen
    moved = bits(net, "stages.1.1.running")
    assert len(moved) == 2 and all(moved[name] != trained[name] for name in trained)


def test_a_frozen_layer_is_the_same_function_in_train_and_eval_mode(message_for):
    net, images = Normed(), torch.rand(8, 1, 8, 8)
    net.stages[0][1].running_mean.fill_(0.3)
    apply_plan(net, message_for(net, entries_below(net, "stages.0.")))
    outputs = {}
    net.stages[0].register_forward_hook(lambda *args: outputs.setdefault(net.training, args[2].detach()))
    net.train()(images)
    assert net.stages[0][1].training  # its mode is the model's, outside its forward pass
    net.eval()(images)
    assert torch.equal(outputs[True], outputs[False])


def test_a_later_plan_lets_the_statistics_move_again(message_for):
    net, images = Normed(), torch.rand(8, 1, 8, 8)
    frozen = entries_below(net, "stages.0.")
    for plan, moves in [(frozen, False), (frozen, False), ((), True), (frozen, False)]:
        apply_plan(net, message_for(net, plan))
        before = bits(net, "stages.0.1.")
        net.train()(images)
        assert (bits(net, "stages.0.1.") != before) == moves
    apply_plan(net, Message(RecordDict({"arrays": ArrayRecord(net.state_dict())}), 1, "train"))
    net(images)
    assert bits(net, "stages.0.1.") != before


def test_a_forward_pass_that_fails_leaves_the_modes_alone(message_for):
    net = Normed()
    apply_plan(net, message_for(net, entries_below(net, "stages.0.")))
    with pytest.raises(ValueError, match="expected 4D"):
        net.stages[0][1](torch.rand(4))
    assert all(module.training for module in net.modules())


def test_statistics_that_train_and_weights_that_do_not(message_for):
    """A plan may freeze a norm's weights alone: its statistics then follow the batches."""
    net = Normed()
    apply_plan(net, message_for(net, ("stages.0.1.weight", "stages.0.1.bias", "stages.0.1.num_batches_tracked")))
    before = bits(net, "stages.0.1.running")
    net(torch.rand(8, 1, 8, 8))
    assert bits(net, "stages.0.1.running") != before


def test_backward_ends_at_the_lowest_layer_that_trains(message_for):
    """No graph is kept below it, so neither its activations nor its time are spent."""
    net = TinyViT((1, 8, 8), 10, width=16, depth=3, heads=2, fused=True)
    blocks = find_blocks(net)
    trains = {*blocks.layers[2], *blocks.head}
    apply_plan(net, message_for(net, tuple(name for name in blocks.layout.names if name not in trains)))
    needs_graph = []
    for block in net.blocks:
        block.register_forward_hook(lambda *args: needs_graph.append(args[2].requires_grad))
    step(net, OPTIMIZERS["AdamW"](net.parameters()))
    assert needs_graph == [False, False, True]
    with_gradient = {name for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in net.named_parameters() if name.startswith(("blocks.2.", "head."))}


def test_a_message_of_another_strategy_freezes_nothing():
    InProcessGrid([])
    net = model()
    plan = apply_plan(net, Message(RecordDict({"arrays": ArrayRecord(net.state_dict())}), 1, "train"))
    assert all(parameter.requires_grad for parameter in net.parameters()) and plan.penalty() == 0.0


def test_a_model_that_wraps_the_sent_one_is_named(message_for):
    with pytest.raises(ValueError, match=r"'blocks\.0\.attention\.qkv.*not a wrapper of it"):
        apply_plan(nn.Sequential(model()), message_for(model(), find_blocks(model()).query_key))


def test_frozen_values_may_live_on_another_dtype(message_for):
    sent = model(seed=2)
    net = model(seed=2).to(torch.bfloat16)
    apply_plan(net, message_for(sent, find_blocks(sent).query_key))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.zero_grad()
    net(torch.rand(4, 1, 8, 8).to(torch.bfloat16)).sum().backward()
    optimizer.step()
    expected = sent.blocks[0].attention.qkv.weight[:32].detach().to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(net.blocks[0].attention.qkv.weight[:32].detach().float().numpy(), expected)


def test_an_apps_own_setting_of_the_same_name_is_no_ridge(message_for):
    msg = message_for(model(), ())
    msg.content["config"] = ConfigRecord({"ridge": 3.0})
    assert apply_plan(model(), msg).penalty() == 0.0
