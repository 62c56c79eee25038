"""Deployments: a server that restarts itself, credentials, checks of an installation."""
