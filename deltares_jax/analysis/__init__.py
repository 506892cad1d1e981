"""Figures and reports about runs."""
