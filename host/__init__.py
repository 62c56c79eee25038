"""What any machine of a deployment needs, whichever side it is on: processes, logs, limits, Flower's own programs."""
