"""Predict how long a step takes: its operations, and its collectives over links of a given speed."""
