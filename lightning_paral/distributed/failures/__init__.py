"""What happens when a rank fails: all ranks learn of it, end soon, and save what they can."""
