"""What methods share that keep a model for each client."""
