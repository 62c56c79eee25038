"""What people use around the two apps; not in the app bundle that clients get."""
