"""`paral doctor`: what a machine has, which strategies are ready on it, and whether its ranks can communicate."""
