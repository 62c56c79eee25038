"""`tepal.training.prediction` under the name by which apps import it."""

from tepal.training.prediction import Diversity, EnsembleScore, Predictions, predict, score_ensemble

__all__ = ["Diversity", "EnsembleScore", "Predictions", "predict", "score_ensemble"]
