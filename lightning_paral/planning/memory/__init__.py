"""What each engine allocates on a rank during a step."""
