"""Trained models at work: held-out loss, generation, scores of requests, tasks."""
