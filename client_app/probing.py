"""`tepal.training.probing` under the name by which apps import it."""

from tepal.training.probing import LayerScores, layer_scores, probe_layers

__all__ = ["LayerScores", "layer_scores", "probe_layers"]
