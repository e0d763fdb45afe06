"""Weights & Biases tracker."""
