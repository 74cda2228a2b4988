"""However a step is carried out, on one rank or on two unequal ones, it is the step of a plain loop."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flodl.distributed import Ranks, launch
from flodl.train import Loss, Trainer, adamw
from flodl.train.schedule import Linear
from flodl.train.step import route

torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # what it imports takes longer than these runs
ROWS, BATCH, WIDTH, CLASSES, EPOCHS = 43, 8, 6, 3, 2
LR, SLOW = 1e-2, 0.25


class Repeats:
    """Stands in for capturing where there is no CUDA: a replay runs the step again, on the inputs kept for it."""

    replayed = 0

    def watch(self, run):
        return run(), None

    def capture(self, run):
        def replay():
            Repeats.replayed += 1
            return run()

        return replay

    def beside(self, ranks):
        return self, "nothing is launched beside here"


def make_model(device=None):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def make_data():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, WIDTH, generator=g, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, CLASSES, (ROWS,), generator=g)}


def loss_of(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def counted(model, batch):
    """Rows of class 0 are not counted, so ranks and micro-batches weigh what they hold."""
    kept = (batch["y"] != 0).sum()
    return Loss(cross_entropy(model(batch["x"]), batch["y"], ignore_index=0, reduction="sum"), kept)


def groups(model):
    """The first layer learns at a quarter of the rate, without decay."""
    return [
        {"params": list(model[0].parameters()), "lr": LR * SLOW, "weight_decay": 0.0},
        {"params": list(model[2].parameters())},
    ]


PARTS = {
    "groups": {"parameter_groups": groups, "schedule": Linear(LR, LR / 10, 12)},
    "accumulated": {"accumulate": 3},
    "clipped": {"max_grad_norm": 0.05},
}
RECIPES = {**PARTS, "all of them": {name: value for part in PARTS.values() for name, value in part.items()}}
WAYS = ("host", "device", "captured", "own loop")


def by_hand(recipe, train_step):
    """Return the parameters after the same steps of whole batches, written plainly."""
    model, data = make_model(), make_data()
    own = recipe.get("parameter_groups", lambda model: model.parameters())(model)
    optimizer = torch.optim.AdamW(own, lr=LR, weight_decay=0.1)
    size, step = BATCH * recipe.get("accumulate", 1), 0
    for _ in range(EPOCHS):
        for first in range(0, ROWS, size):
            if "schedule" in recipe:
                for group, scale in zip(optimizer.param_groups, (SLOW, 1.0), strict=True):
                    group["lr"] = recipe["schedule"].lr(step) * scale
            found = train_step(model, {name: part[first : first + size] for name, part in data.items()})
            (found.as_mean() if isinstance(found, Loss) else found).backward()
            if "max_grad_norm" in recipe:
                nn.utils.clip_grad_norm_(model.parameters(), recipe["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return {name: p.detach() for name, p in model.named_parameters()}


def settings_of(recipe, ranks):
    shares = {"shares": (3.0, 1.0)} if ranks == 2 else {}
    return {"batch_size": BATCH, "check_every": 1, "timeout_s": 300, **shares, **recipe}


def own_loop(ranks, recipe, train_step):
    """Write the loop by hand; backward is torch's own where a step is one batch and its loss a mean."""
    trainer = Trainer.setup(
        make_model(), optimizer=adamw(LR, weight_decay=0.1), ranks=ranks, **settings_of(recipe, ranks.world)
    )
    plainly = "accumulate" not in recipe and train_step is loss_of
    for _ in trainer.epochs(EPOCHS):
        for batch in trainer.batches(make_data(), shuffle=False):
            loss = train_step(trainer.model, batch)
            if plainly:
                loss.backward()
            else:
                trainer.backward(loss)
            trainer.step()
    return {name: p.tolist() for name, p in trainer.model.named_parameters()}


def trained(way, ranks, recipe, train_step, monkeypatch):
    """Return the parameters that a way of carrying out steps ends with."""
    if way == "own loop":
        if ranks == 1:
            return own_loop(Ranks(), recipe, train_step)
        found = launch(own_loop, (recipe, train_step), ranks=2, start="fork", timeout_s=300).wait()
        assert found[0] == found[1]
        return found[0]
    capturer = None if way == "host" else Repeats()
    monkeypatch.setattr(route, "make_capturer", lambda device, settings: capturer)
    built = Trainer.builder(make_model, adamw(LR, weight_decay=0.1), train_step).dataset(make_data(), shuffle=False)
    built.set(**settings_of(recipe, ranks), num_epochs=EPOCHS, policy="sync", capture=way == "captured" or "auto")
    if way == "device":
        built.set(capture=False)
    if ranks == 2:
        built.devices(2, start="fork")
    else:
        built.devices("cpu")
    if way == "host":
        built.set(capture=False)
    return built.run().parameters


@pytest.mark.parametrize("train_step", [loss_of, counted])
@pytest.mark.parametrize(("way", "ranks", "name"), [*product(WAYS, (1, 2), RECIPES)])
def test_every_way_is_the_plain_loop(way, ranks, name, train_step, monkeypatch):
    recipe, before = RECIPES[name], Repeats.replayed
    found = trained(way, ranks, recipe, train_step, monkeypatch)
    for parameter, expected in by_hand(recipe, train_step).items():
        given = torch.as_tensor(found[parameter], dtype=torch.float64)
        # a clip factor and a rate on the device are float32, and AdamW makes much of little
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-12 if way in ("host", "own loop") else 2e-6)
    if ranks == 1:
        assert (Repeats.replayed > before) == (way == "captured")
