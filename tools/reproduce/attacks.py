"""Hostile clients: they follow the protocol, and return updates that are to spoil the model.

An update is w_trained − w_received, over the entries that the client was asked to train. All attacks but the flipped
labels replace it. "A little is enough" needs the honest clients' updates of the round: the hostile clients know them,
which is more than its paper assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tepal.exchange.layout import Arrays
from tepal.exchange.manifest import Manifest
from tepal.exchange.mod import received
from tepal.exchange.plan import SCORED_AS, TRAIN
from tepal.exchange.records import values_of
from tepal.strategies.in_process import InProcessGrid, Node

NO_ATTACK = "none"
LABEL_FLIP = "label flip"
LITTLE = "a little is enough"
SCALE = 100.0
"""Factor of a scaled update."""
NOISE = 1.0
"""Standard deviation of noise, per coordinate."""

Updates = Mapping[str, np.ndarray]


def sign_flip(update: Updates, rng: np.random.Generator) -> Updates:
    """−u"""
    return {name: -array for name, array in update.items()}


def scaled(update: Updates, rng: np.random.Generator) -> Updates:
    """100 u"""
    return {name: SCALE * array for name, array in update.items()}


def noise(update: Updates, rng: np.random.Generator) -> Updates:
    """A draw of N(0, 1) for each coordinate, whatever the update is."""
    return {name: rng.normal(0.0, NOISE, array.shape) for name, array in update.items()}


OF_OWN_UPDATE: Mapping[str, Callable[[Updates, np.random.Generator], Updates]] = {
    "sign flip": sign_flip, "scaled by 100": scaled, "noise": noise,
}  # fmt: skip
"""Attacks that are computed from the client's own update."""
ATTACKS = (NO_ATTACK, *OF_OWN_UPDATE, LABEL_FLIP, LITTLE)


def little_z(clients: int, hostile: int) -> float:
    """z of "a little is enough" (Baruch et al. 2019, arXiv:1902.06156, algorithm 3).

        s = ⌊n/2 + 1⌋ − f        honest clients that must be farther from the mean than the hostile ones
        z = Φ⁻¹((n − f − s) / (n − f))

    Raises ValueError unless 0 < f < n/2.
    """
    if not 0 < hostile < clients / 2:
        raise ValueError(f"{hostile} hostile clients of {clients}; the attack is for more than 0 and less than half")
    needed = math.floor(clients / 2 + 1) - hostile
    return NormalDist().inv_cdf((clients - hostile - needed) / (clients - hostile))


def little(honest: Sequence[Updates], names: Iterable[str], z: float) -> Updates:
    """mean − z·std of the honest updates, coordinate by coordinate; of the entries that any of them has."""
    made = {}
    for name in names:
        if values := [update[name] for update in honest if name in update]:
            made[name] = np.mean(values, axis=0, dtype=np.float64) - z * np.std(values, axis=0, dtype=np.float64)
    return made


class Population:
    """The clients of one run, of which some attack in every round; `grid` connects them.

    Args:
        clients: number of all clients.
        hostile: number of hostile clients, drawn by the seed.
        attack: one of ATTACKS; with NO_ATTACK, the same clients are honest.
        seed: of the draw, and of noise.
    """

    def __init__(self, clients: int, hostile: int, attack: str, seed: int) -> None:
        if attack not in ATTACKS:
            raise ValueError(f"unknown attack {attack!r}: allowed are {', '.join(ATTACKS)}")
        self.clients = clients
        self.hostile = frozenset(np.random.default_rng(seed).choice(clients, hostile, replace=False).tolist())
        self.attack = attack
        self.seed = seed
        self._z = little_z(clients, hostile) if attack == LITTLE else 0.0
        self._round = 0
        self._updates: dict[str, list[Updates]] = {}  # tree → the honest clients' updates of this round
        self._scores: dict[str, float] = {}  # client that never attacks → accuracy in its last evaluation

    @property
    def accuracy(self) -> float | None:
        """Mean of the accuracies that those clients measured last which never attack; None if they measured none."""
        return float(np.mean(list(self._scores.values()))) if self._scores else None

    def grid(self, nodes: Sequence[Node], values: Mapping[str, Any]) -> InProcessGrid:
        """Connect the nodes: those with a hostile client's number get its app."""
        honest, hostile = self._app(self._train_honestly), self._app(self._train_hostile)
        for number, node in enumerate(nodes):
            node.app = hostile if number in self.hostile and self.attack != NO_ATTACK else honest
        if self.attack != LITTLE:
            return InProcessGrid(nodes, values)
        return HonestFirst(nodes, values, hostile={number + 1 for number in self.hostile})

    def _app(self, train: Callable[[Message, Context], Message]) -> ClientApp:
        from tepal.client_app import app as client  # only training needs it, and torch

        app = ClientApp(mods=[client.exchange])
        app.train()(train)
        app.train("probe")(client.probe)
        app.evaluate()(self._evaluate)
        return app

    def _evaluate(self, msg: Message, context: Context) -> Message:
        from tepal.client_app.app import evaluate

        reply, found = evaluate(msg, context), received(msg)
        assert found is not None
        if int(context.node_config["partition-id"]) not in self.hostile:
            of = found.plan.options.get(SCORED_AS, "received")
            accuracy = reply.content.metric_records["metrics"][f"{of}-accuracy"]
            assert isinstance(accuracy, float)
            self._scores[found.plan.client] = accuracy
        return reply

    def _train_honestly(self, msg: Message, context: Context) -> Message:
        from tepal.client_app.app import train

        reply = train(msg, context)
        if self.attack == LITTLE:
            self._updates_of(msg).append(_update(msg, reply))
        return reply

    def _train_hostile(self, msg: Message, context: Context) -> Message:
        from tepal.client_app.app import train, train_client
        from tepal.client_app.local_client import LocalClient

        if self.attack == LABEL_FLIP:
            client = LocalClient.of(msg, context)
            flipped = int(client.sizes["classes"]) - 1 - client.batches.labels
            return train_client(replace(client, batches=replace(client.batches, labels=flipped)), msg)
        reply, found = train(msg, context), received(msg)
        assert found is not None
        own = _update(msg, reply)
        if self.attack == LITTLE:
            made = little(self._updates_of(msg), own, self._z)
        else:
            drawn = np.random.default_rng([self.seed, int(context.node_config["partition-id"]), found.plan.round])
            made = OF_OWN_UPDATE[self.attack](own, drawn)
        values = dict(_values(msg, reply))
        for name, update in made.items():
            values[name] = np.asarray(found.model[name] + update, dtype=values[name].dtype)
        reply.content["arrays"] = found.record_of(found.plan.model, values)
        return reply

    def _updates_of(self, msg: Message) -> list[Updates]:
        """The honest updates of the message's round to its model; those of earlier rounds are forgotten."""
        found = received(msg)
        assert found is not None
        if found.plan.round != self._round:
            self._round, self._updates = found.plan.round, {}
        return self._updates.setdefault(found.plan.model, [])


def _values(msg: Message, reply: Message) -> Arrays:
    """All entries of the model in an app's reply."""
    found = received(msg)
    assert found is not None
    raw = reply.content.array_records["arrays"]
    return found.layout.split({name: values_of(array) for name, array in raw.items()})


def _update(msg: Message, reply: Message) -> Updates:
    """w_trained − w_received of the trained entries, as new arrays."""
    found = received(msg)
    assert found is not None
    values = _values(msg, reply)
    return {name: values[name] - found.model[name] for name in found.plan.trains}


class HonestFirst(InProcessGrid):
    """A grid in which hostile clients train after all honest clients of their round.

    Args:
        nodes: all clients; in every round all of them train.
        run_config: as for InProcessGrid.
        hostile: node ids of the hostile clients.
    """

    def __init__(self, nodes: Iterable[Node], run_config: Mapping[str, Any], *, hostile: Iterable[int]) -> None:
        super().__init__(nodes, run_config)
        self.hostile = frozenset(hostile)
        self._training: dict[str, tuple[int, int]] = {}  # message id → node id and round, of messages not answered
        self._trained: set[tuple[int, int]] = set()  # node id and round

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        pushed = list(messages)
        plans = [Manifest.from_content(message.content).plan for message in pushed]
        ids = super().push_messages(pushed)
        for message_id, message, plan in zip(ids, pushed, plans, strict=True):
            if plan.action == TRAIN:
                self._training[message_id] = message.metadata.dst_node_id, plan.round
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message_id in message_ids:
            node_id, number = self._training.get(message_id, (0, 0))
            honest = {(other, number) for other in self.nodes if other not in self.hostile}
            if node_id in self.hostile and not honest <= self._trained:
                continue  # it is asked for again
            replies += super().pull_messages([message_id])
            if self._training.pop(message_id, None):
                self._trained.add((node_id, number))
        return replies
