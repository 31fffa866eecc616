"""Datasets whose batches are divided over the replicas."""
