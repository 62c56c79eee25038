"""What tells one version of this app from another."""

WHO = "first"
