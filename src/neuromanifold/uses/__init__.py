"""What people want a Fisher information for; one file for each use."""
