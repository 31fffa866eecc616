"""The files that an Estimator writes while it runs."""
