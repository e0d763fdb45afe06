"""Grouped projection (GQA, MQA): several query heads share one key and value head."""
