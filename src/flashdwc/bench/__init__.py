"""Benchmarks: a registry of layers in suites, timers, result files, plots, a report. ``flashdwc bench`` runs them."""
