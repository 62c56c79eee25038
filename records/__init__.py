"""What a run leaves on disk, and what it shows while it goes on."""
