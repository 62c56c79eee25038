"""`tepal.training.loop` under the name by which apps import it."""

from tepal.training.loop import Batches, Fitted, accumulation, device_of, fit, score, trained_parameters

__all__ = ["Batches", "Fitted", "accumulation", "device_of", "fit", "score", "trained_parameters"]
