"""The command line `tepal …`, one file a command."""
