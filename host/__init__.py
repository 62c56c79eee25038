"""What client and server both need: processes, files and locks, logs, limits, credentials, and Flower's programs."""
