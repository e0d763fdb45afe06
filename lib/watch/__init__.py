"""Monitoring of running trainings: alarm rules over recorded values, and a live screen."""
