"""Modules that are traced for ONNX: a saved model or ensemble, with tensors as inputs and named outputs.

    pixel_values (batch, channels, height, width)   → logits, probabilities (batch, classes)
    input_ids (batch, tokens)                       → logits, probabilities (batch, classes)
    input_ids, roles (batch, choices, tokens)       → logits, probabilities (batch, choices)
    inputs (batch, features) of a table             → logits, probabilities (batch, classes)
    inputs (batch, features) or (batch, length, features) → outputs (batch, outputs)

An ensemble returns the mean over its members of the probabilities or of the outputs; it has no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from tepal import models
from tepal.tools.export.delivered import Delivered
from tepal.training.data.tokens import CHOICE, PADDING
from tepal.training.tasks import Task

_INPUTS = {
    models.IMAGES: ("pixel_values",),
    models.TEXTS: ("input_ids",),
    models.CHARACTERS: ("input_ids",),
    models.SEQUENCES: ("inputs",),
    models.TABLES: ("inputs",),
    models.CHOICES: ("input_ids", "roles"),
}


class Graph(nn.Module):
    """The members of an ensemble, or one model, as one module. See this file's first lines."""

    def __init__(self, members: Sequence[nn.Module], task: Task) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.task = task
        self.input_names = _INPUTS[task.name]
        if task.regression:
            self.output_names: tuple[str, ...] = ("outputs",)
        else:
            self.output_names = ("logits", "probabilities") if len(members) == 1 else ("probabilities",)

    def split(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the module's inputs from those of `Task.outputs`."""
        return tuple(each.contiguous() for each in inputs.unbind(2)) if self._of_choices else (inputs,)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        call = choice_scores if self._of_choices else self.task.outputs
        outputs = [call(member, *inputs) for member in self.members]
        return self._combined(outputs)

    @torch.no_grad()
    def expected(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs by the functions with which the models were trained and scored."""
        return self._combined([self.task.outputs(member, inputs) for member in self.members])

    @property
    def _of_choices(self) -> bool:
        return self.task.name == models.CHOICES

    def _combined(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self.task.regression:
            return (torch.stack(tuple(outputs)).mean(dim=0),)
        probabilities = torch.stack([each.softmax(dim=-1) for each in outputs]).mean(dim=0)
        return (*outputs, probabilities) if len(outputs) == 1 else (probabilities,)


def graph_of(delivered: Delivered) -> Graph:
    """Return the module of a saved model or ensemble, with its weights."""
    members = [deepcopy(delivered.model(state)) for state in delivered.predictor.states()]
    return Graph(members, delivered.task).eval()


def choice_scores(model: nn.Module, input_ids: Tensor, roles: Tensor) -> Tensor:
    """Return what `tasks.choice_scores` does, without shapes that depend on values, which a graph cannot have.

    Args:
        model: (token ids, attention_mask=) → logits for every token.
        input_ids: (batch, choices, tokens).
        roles: of the tokens, in the same shape.

    Returns:
        Scores (batch, choices).
    """
    batch, choices = input_ids.shape[:2]
    ids, of = input_ids.flatten(0, 1), roles.flatten(0, 1)
    logits = model(ids, attention_mask=(of != PADDING).long())[:, :-1].float()
    chosen = of[:, 1:] == CHOICE
    found = logits.gather(2, ids[:, 1:, None])[:, :, 0] - logits.logsumexp(dim=-1)
    counts = chosen.sum(dim=1)
    scores = (found * chosen).sum(dim=1) / counts.clamp(min=1)
    return scores.masked_fill(counts == 0, -torch.inf).reshape(batch, choices)
