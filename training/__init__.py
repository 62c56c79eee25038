"""Local training, scoring and prediction of one model on the data of one machine."""
